"""Seats on the node's GPUs: their groups, once the driver has answered, and kubelet's device plugin for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import DecodeError

from kybernate.agent.device_plugin.answers import NodeGpus
from kybernate.agent.device_plugin.plugin import DevicePlugin
from kybernate.agent.device_plugin.resource import Resource
from kybernate.agent.inventory.gpus import ask_driver
from kybernate.agent.inventory.node_facts import memory_message
from kybernate.agent.part import Part, Work
from kybernate.agent.seat_settings import configuration_of
from kybernate.agent.seats.acting import Acting
from kybernate.agent.seats.arbiter import Arbiter, unread
from kybernate.agent.seats.around import Around
from kybernate.agent.seats.claims import Key
from kybernate.agent.seats.former import former_turns
from kybernate.agent.seats.messages import seat_message
from kybernate.agent.seats.turn_files import TurnFiles
from kybernate.agent.seats.watching import UseWatch
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.failure import Invalid
from kybernate.seats.configuration import Configuration, SeatsInvalid
from kybernate.seats.groups import Place, Topology
from kybernate.seats.model import NEVER, Seat, Turn
from kybernate.verbs.model import SEAT
from kybernate.verbs.room import Taker
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import CudaInfo
from kybernate_shim.messages import events_pb2
from kybernate_shim.run_directory import SEATS_WAIT

if TYPE_CHECKING:
    from kybernate.agent.assembly import Agent

ADVICE = "docs/seats.md describes the configuration; the agent starts again once it is right"
WAKE = "kybernate.io/wake"  # annotation of a pod
EXECS = 'topic=="/tasks/exec-started"'
RAM_SECONDS = 0.5  # a figure of host memory is not older
USE = "use of the GPU"  # who has begun an operation
AGAIN_SECONDS = 10.0  # until a driver that did not answer is asked again


class Seats(Part):
    """Without a configuration of seats, it does nothing."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._configuration: Configuration | None = None
        self._arbiter: Arbiter | None = None
        self._problem = "the driver was not asked yet"
        self._published: dict[str, object] = {}
        self._free = (0.0, 0, 0)
        self._turn_files = TurnFiles()
        self._watch = UseWatch(lambda key: agent.known.inventory.containers.pids().get(key), self._turn_files)
        self._waking = WakingOnUse(agent)

    async def start(self) -> None:
        """Raises Invalid."""
        try:
            self._configuration = configuration_of(self._agent.settings().seats)
        except SeatsInvalid as error:
            raise Invalid(str(error), state="the agent does not run", advice=ADVICE) from error
        self._agent.operations.ended.hear(self._ended)
        owner = self._agent.rooms.owner
        if self._configuration is not None and self._configuration.profiles:
            owner.grant, owner.seated = self._grant, self._is_seated
            waits = self._turn_files.waits = self._configuration.waits_without_agent
        else:
            waits = False
            self._turn_files.show({})  # a node that had seats
        self.closing.callback(self._turn_files.close)
        shown = self._agent.settings().socket.with_name(SEATS_WAIT.name)  # next to the socket that shims ask
        await asyncio.to_thread(show_policy, shown, waits)

    def work(self) -> Iterable[Work]:
        if self._configuration is not None and self._configuration.profiles:
            yield self._run(self._configuration)
        else:
            yield self._waking.run(self._watch)

    async def _run(self, configuration: Configuration) -> None:
        log, settings = self._agent.log, self._agent.settings().seats
        topology = topology_of(await self._first_answer())
        try:
            places = configuration.places(topology)
        except SeatsInvalid as error:
            log.error("seats.not_used", error=str(error), advice=ADVICE)
            return
        plugin = DevicePlugin([], settings.device_plugins, settings.pod_resources, self._look, log)
        self.closing.push_async_callback(plugin.close)
        for profile in configuration.profiles:
            plugin.resources.append(
                Resource(
                    profile,
                    [place for place in places if place.profile == profile],
                    settings.device_plugins,
                    plugin.taken,
                    by_cdi=settings.devices == "cdi",
                    log=log,
                )
            )
        await plugin.refresh()  # so that kubelet's first list is the right one
        await self._agent.known.inventory.containers.ready.wait()
        around = self._around({place.name: place for place in places}, lambda: {one.name for one in plugin.taken()})
        former = await former_turns(self._agent.operations.engine, self._agent.known.inventory.containers.claims())
        self._arbiter = Arbiter(places, configuration.rules, around, self._watch, former)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arbiter.run())
            group.create_task(self._follow(self._arbiter))
            group.create_task(self._follow_execs(self._arbiter))
            group.create_task(plugin.run())
            group.create_task(plugin.watch())

    async def _first_answer(self) -> CudaInfo:
        """Return what the driver reports, once it answers and has GPUs: groups cannot be made before that."""
        reported = ""
        while True:
            try:
                info = await ask_driver()
                problem = "" if info.gpus else "the driver reports no GPU"
            except CudaError as error:
                problem = str(error)
            else:
                if info.gpus:
                    return info
            if problem != reported:
                self._agent.log.warning("gpus.not_reported", error=problem, state="no seats are advertised until then")
                reported = self._problem = problem
            await asyncio.sleep(AGAIN_SECONDS)

    # ---- around the arbiter

    def _around(self, places: Mapping[str, Place], kubelets: Callable[[], Iterable[str]]) -> Around:
        agent = self._agent
        inventory, owner = agent.known.inventory, agent.rooms.owner

        def publish(seat: Seat, key: Key | None, turn: Turn | None, error: str, crowded: bool) -> None:
            known = (seat, key, turn, error, crowded)
            if self._published.get(seat.name) != known:
                self._published[seat.name] = known
                container, claim = (
                    (_container(agent, key), inventory.containers.claims().get(key)) if key else (None, None)
                )
                title = container.title if container is not None else ""
                wakes = claim is not None and claim.wake_on_use
                message = seat_message(places[seat.name], seat, key, turn, title=title, error=error)
                message.wake_on_use, message.crowded = wakes, crowded
                agent.events.hub.put(message)

        return Around(
            containers=inventory.containers,
            container=lambda key: _container(agent, key),
            look=inventory.gpus.look,
            waiting=lambda: owner.waiting,
            taking=lambda: owner.taking,
            look_again=owner.look_again,
            acts=Acting(agent.operations.engine),
            note=cast(Any, agent.events.log.note),
            publish=publish,
            free_memory=self._free_memory,
            label=self._label,
            priority=lambda one: agent.cluster.priority(one.pod_namespace, one.pod) if one.pod else None,
            wish=lambda one: agent.cluster.annotation(one.pod_namespace, one.pod, WAKE) if one.pod else "",
            asked=self._asked,
            is_own=self._is_own,
            leaves=self._leaves,
            show_turns=self._turn_files.show,
            kubelets=kubelets,
        )

    def _operation(self, id: str) -> wire.Operation | None:
        found: wire.Operation | None = self._agent.events.hub.get("operation", id)
        return found

    def _is_own(self, operation: str) -> bool:
        found = self._operation(operation)
        return found is not None and SEAT in found.labels

    def _asked(self, operation: str) -> float:
        found = self._operation(operation)
        return found.created.ToMicroseconds() / 1e6 if found is not None else NEVER

    def _leaves(self, operation: str) -> Key | None:
        found = self._operation(operation)
        return (found.namespace, found.container) if found is not None and found.verb == "swap" else None

    async def _follow(self, arbiter: Arbiter) -> None:
        """Let the arbiter have a turn whenever a container changes."""
        async with aclosing(self._agent.events.hub.subscribe(kinds=("container",))) as changes:
            async for _ in changes:
                arbiter.wake()

    async def _follow_execs(self, arbiter: Arbiter) -> None:
        """Take an exec into a suspended container as a request, but for pods whose probes are execs."""
        containerd = self._agent.events.containerd
        while True:
            try:
                async with aclosing(containerd.events((EXECS,))) as events:
                    async for envelope in events:
                        started = events_pb2.TaskExecStarted.FromString(envelope.event.value)
                        key = envelope.namespace, started.container_id
                        if key in arbiter.suspended() and not self._probes_by_exec(key):
                            arbiter.ask(key, "exec")
            except (ContainerdUnreachable, ContainerdRefused, DecodeError):
                pass  # execs in between ask for nothing
            await asyncio.sleep(AGAIN_SECONDS)

    def _probes_by_exec(self, key: Key) -> bool:
        container = _container(self._agent, key)
        pod = self._agent.cluster.probes(container.pod_namespace, container.pod) if container is not None else None
        return "'exec':" in str(pod)

    def _free_memory(self) -> tuple[int, int]:
        """Return the host memory that VRAM can go to, what is available or free in the arena, and the latter alone."""
        at, found, arena = self._free
        now = time.monotonic()
        if now - at >= RAM_SECONDS or not at:
            memory = memory_message(self._agent.config())
            arena = memory.arena_bytes - memory.arena_used_bytes
            found = memory.available_bytes + arena
            self._free = now, found, arena
        return found, arena

    async def _label(self, key: Key, seat: str) -> None:
        try:
            await self._agent.events.containerd.label(*key, SEAT, seat)
        except (ContainerdRefused, ContainerdUnreachable) as error:
            self._agent.log.warning("seat.not_labelled", task=key[1], seat=seat, error=str(error))

    def _grant(self, taker: Taker, before: Sequence[Taker]) -> str:
        """Decide as the arbiter; before there is one, what has a seat waits."""
        if self._arbiter is not None:
            return self._arbiter.grant(taker, before)
        containers, key = self._agent.known.inventory.containers, (taker.namespace, taker.container)
        if not containers.ready.is_set():
            return "the agent reads the node's containers"
        if key in containers.claims():
            return f"the driver does not answer: {self._problem}"
        return unread(containers, _container(self._agent, key), taker)

    def _is_seated(self, namespace: str, container: str) -> bool:
        return (namespace, container) in self._agent.known.inventory.containers.claims()

    def _ended(self, operation: wire.Operation) -> None:
        """End the requests of a container that was put to sleep by another caller than the arbiter."""
        slept = operation.verb in ("sleep", "suspend") and operation.state == wire.SUCCEEDED
        if slept and SEAT not in operation.labels:
            self._watch.settle((operation.namespace, operation.container))
            if self._arbiter is not None:
                self._arbiter.forget((operation.namespace, operation.container))

    async def _look(self) -> NodeGpus | None:
        try:
            info = await ask_driver()
        except CudaError:
            return None  # which GPU is sick is not known, and pods of an unhealthy one could not restart
        return gpus_of(info)


class WakingOnUse:
    """On a node without seats: wakes suspended containers whose programs use their GPUs, where annotations say so."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._waking: dict[Key, asyncio.Task[None]] = {}

    async def run(self, watch: UseWatch) -> None:
        await self._agent.known.inventory.containers.ready.wait()
        try:
            await watch.run(self._suspended, self._used)
        finally:
            for task in self._waking.values():
                task.cancel()

    def _suspended(self) -> list[Key]:
        keys = self._agent.known.inventory.containers.waking_on_use()
        found = ((key, _container(self._agent, key)) for key in keys)
        return [key for key, one in found if one is not None and one.gpu == wire.Container.SUSPENDED]

    def _used(self, key: Key) -> None:
        if key not in self._waking:
            self._waking[key] = asyncio.create_task(self._wake(key))
            self._waking[key].add_done_callback(lambda _: self._waking.pop(key))

    async def _wake(self, key: Key) -> None:
        found = await Acting(self._agent.operations.engine, USE).wake("", key)
        if not found.succeeded:
            self._agent.log.warning("use.not_answered", task=key[1], error=found.error, state="it stays suspended")
            await asyncio.sleep(AGAIN_SECONDS)


def _container(agent: Agent, key: Key) -> wire.Container | None:
    found: wire.Container | None = agent.events.hub.get("container", f"{key[0]}/{key[1]}")
    return found


def show_policy(file: Path, waits: bool) -> None:
    """Show shims what the start of a container with a seat does while no agent answers. Blocks."""
    if waits:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
    else:
        file.unlink(missing_ok=True)


def gpus_of(info: CudaInfo) -> NodeGpus:
    """Return the node's GPUs by the numbers of their device nodes. Those that the driver reports are healthy."""
    numbered = {_number(gpu.number, place): gpu for place, gpu in enumerate(info.gpus)}
    return NodeGpus(
        {index: gpu.uuid for index, gpu in numbered.items()},
        {index: gpu.node for index, gpu in numbered.items()},
        frozenset(numbered),
    )


def topology_of(info: CudaInfo) -> Topology:
    """Return the GPUs' topology; where NVML does not report a link, by the NUMA nodes that they are near."""
    gpus = gpus_of(info)
    by_uuid = {gpu.uuid: gpu for gpu in info.gpus}
    count = max(gpus.numa, default=-1) + 1
    numa = tuple(gpus.numa.get(index, -1) for index in range(count))

    def link(one: int, other: int) -> str:
        if one == other:
            return "X"
        reported = by_uuid[gpus.uuids[one]].links if one in gpus.uuids else {}
        return reported.get(gpus.uuids.get(other, ""), "NODE" if numa[one] == numa[other] != -1 else "SYS")

    return Topology(tuple(tuple(link(a, b) for b in range(count)) for a in range(count)), numa)


def _number(number: int | None, place: int) -> int:
    return place if number is None else number

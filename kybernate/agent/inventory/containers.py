"""The containers of the node in the hub: each is looked at when containerd or a shim says that it has changed.

An event makes the agent look again at one container; what it looks at is the truth, so that neither the order of events
nor a repeated one matters. Looks at one container follow each other, those at several run concurrently. Without events
nothing is asked, but of containers with a running operation (each second), and of those whose shim does not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import psutil

from kybernate.agent.inventory import shims
from kybernate.agent.inventory.containerd_events import Connected, EventSource, Lost, follow
from kybernate.agent.inventory.happenings import (
    STATES,
    Happening,
    gpu_moved,
    happenings,
    operation_ended,
    operation_started,
    restore_skipped,
)
from kybernate.agent.inventory.notices import ENDED, SKIPPED, STARTED, Notice
from kybernate.agent.inventory.pod_ip import pod_ip
from kybernate.agent.inventory.state import (
    LONGEST_POLL_SECONDS,
    Known,
    Reported,
    known,
    message_of,
    poll_seconds,
    shown_labels,
)
from kybernate.agent.inventory.workload import OF_PODS
from kybernate.agent.seats.claims import Claim
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.messages import containers_pb2
from kybernate.node.containerd import (
    KIND,
    ContainerdRefused,
    ContainerdUnreachable,
    RecordTooLarge,
    group_of,
    nameless,
)
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import named_kybernate
from kybernate.node.specs import Spec, is_large, spec_of
from kybernate_shim.messages import process_pb2

if TYPE_CHECKING:
    from kybernate_shim.logs import Log

Key = tuple[str, str]  # namespace and id
Ask = Callable[[KnownContainer, str], Awaitable[Reported]]

FIGURES = ("bytes", "frozen_ms", "vram_bytes", "seconds", "error")  # of an operation, by the shim that has ended it
CONCURRENT = 16  # looks at containers that answer
CONCURRENT_SILENT = 4  # looks at containers that have not answered last time, and may take seconds
CONFIRM_SECONDS = 1.0  # after a task was deleted: until it is seen whether containerd agrees
LINGER_SECONDS = 5.0  # for this long, containerd may list a task whose end it has announced
RESYNC_SECONDS = 900.0  # for what no event has reported
SETTLED_SECONDS = 10.0  # after containerd has started: what it still found out about shims is examined again
MOST_GONE = 1024
STEP_SECONDS = 1.0  # how often it is seen what is due
REMEMBERED = 1024  # images of which there is an event


class ContainerSource(EventSource, Protocol):
    """containerd, as far as it is needed here. Calls raise ContainerdUnreachable and ContainerdRefused."""

    @property
    def address(self) -> str:
        """Its socket."""

    async def namespaces(self) -> list[str]:
        """Return the names of all namespaces."""

    async def ids(self, namespace: str) -> list[str]:
        """Return the ids of all containers of a namespace."""

    async def container(self, namespace: str, id: str) -> containers_pb2.Container | None:
        """Return a record."""

    async def task(self, namespace: str, id: str) -> process_pb2.Process | None:
        """Return a container's task."""


class Note(Protocol):
    """Records a durable event without waiting for it."""

    def __call__(self, type: str, level: str, message: str, /, **about: str) -> None: ...


@dataclass
class _Kept:
    """What is kept of a container between two looks."""

    known: Known | None = None
    task: process_pb2.Process | None = None
    reported: Reported = field(default_factory=Reported)
    pod_labels: dict[str, str] = field(default_factory=dict)  # of a sandbox, for the containers of its pod
    gpu_uuids: tuple[str, ...] = ()
    gpu_noted: api.Container.GpuState = api.Container.NO_GPU  # the last that there is an event of, or the first found
    deleted: tuple[int, float] = (0, 0.0)  # pid of a task whose end containerd has announced, and when
    started: tuple[int, int] = (0, 0)  # pid, and when it began in ns
    pod_ip: str = ""  # of that process
    in_flight: int = 0  # as reported by others, and until when
    active_until: float = 0.0
    waits_for: str = ""  # before it takes memory on its GPUs
    failures: int = 0
    due: float = 0.0  # of the next look without an event, 0 for none
    again: bool = False  # something has changed while it was looked at


class Containers:
    """Keeps the hub's containers. `ready` is set once all have been looked at for the first time."""

    def __init__(
        self,
        containerd: ContainerSource,
        hub: Hub,
        note: Note,
        log: Log,
        *,
        ask: Ask = shims.ask,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ready = asyncio.Event()
        self._containerd = containerd
        self._hub = hub
        self._note = note
        self._log = log
        self._ask = ask
        self._now = now
        self._kept: dict[Key, _Kept] = {}
        self._looks: dict[Key, asyncio.Task[bool]] = {}
        self._gone: dict[Key, None] = {}  # the last ones that containerd had not, in order
        self._quick, self._silent = asyncio.Semaphore(CONCURRENT), asyncio.Semaphore(CONCURRENT_SILENT)
        self._connected = False
        self._followed_since_ns = 0  # since 1970; 0 while events are missed
        self._resync = now() + RESYNC_SECONDS
        self._written: OrderedDict[tuple[str, str, str], None] = OrderedDict()  # namespace, container, image

    async def run(self) -> None:
        """Follow containerd until this is cancelled."""
        polling = asyncio.create_task(self._poll())
        try:
            async with aclosing(follow(self._containerd)) as notices:
                async for notice in notices:
                    await self._take(notice)
        finally:
            for task in [polling, *self._looks.values()]:
                task.cancel()
            await asyncio.wait([polling, *self._looks.values()])

    def touch(self, namespace: str, id: str) -> None:
        """Look at a container soon; once more where that is being done."""
        key = namespace, id
        if key in self._looks:
            self._kept[key].again = True
            return
        self._kept.setdefault(key, _Kept())
        self._looks[key] = asyncio.create_task(self._look_until_settled(key))

    def known(self, namespace: str = "") -> list[KnownContainer]:
        """Return containerd's records of all containers, of one namespace where it is named."""
        found = [kept.known.container for kept in self._kept.values() if kept.known is not None]
        return [one for one in found if namespace in ("", one.namespace)]

    def record(self, namespace: str, id: str) -> KnownContainer | None:
        """Return containerd's record of a container as it was seen last, None where there is none any more."""
        kept = self._kept.get((namespace, id))
        return kept.known.container if kept is not None and kept.known is not None else None

    def claims(self) -> dict[Key, Claim]:
        """Return what containers say of their seats; of each that has one."""
        found = {key: kept.known.claim for key, kept in self._kept.items() if kept.known is not None}
        return {key: claim for key, claim in found.items() if claim}

    def waking_on_use(self) -> list[Key]:
        """Return the containers without a seat that a use of their GPUs is to wake."""
        found = [(key, kept.known) for key, kept in self._kept.items()]
        return [key for key, one in found if one is not None and one.wakes_on_use and not one.claim]

    def is_gone(self, namespace: str, id: str) -> bool:
        """Return whether containerd has lately said that there is no such container."""
        return (namespace, id) in self._gone

    def has_followed(self, since_ns: int) -> bool:
        """Return whether no event was missed since then, in ns since 1970."""
        return 0 < self._followed_since_ns <= since_ns

    def record_image(self, namespace: str, id: str, image: str, **figures: str) -> None:
        """Record that a container's image was written, unless its shim has reported it; a later report is skipped."""
        container = self.record(namespace, id)
        happened = operation_ended(container.title if container is not None else id, "checkpoint", "done", image)
        if happened is not None and self._is_first(namespace, id, image):
            self._record(namespace, id, happened, image=image, **figures)

    async def looked_at(self, namespace: str, id: str) -> bool:
        """Look at a container, and return whether that could be done: not while containerd is away."""
        self.touch(namespace, id)
        look = self._looks[namespace, id]
        await asyncio.wait([look])
        return not look.cancelled() and look.result()

    def pids(self) -> dict[Key, int]:
        """Return the first process of each container that has one."""
        found = {key: kept.known.container.pid for key, kept in self._kept.items() if kept.known is not None}
        return {key: pid for key, pid in found.items() if pid}

    def set_gpus(self, used: Mapping[Key, Iterable[str]]) -> None:
        """Note which GPUs containers use now. A suspended one uses none, and keeps those that it had."""
        for key, kept in self._kept.items():
            suspended = kept.reported.status is not None and kept.reported.status.suspended
            uuids = tuple(sorted(used.get(key, ())))
            if uuids != kept.gpu_uuids and not (suspended and not uuids):
                kept.gpu_uuids = uuids
                if kept.known is not None and key not in self._looks:
                    self._publish(kept)

    def set_use(self, key: Key, in_flight: int, until: float) -> None:
        """Note requests in flight at a container, and until when it counts as in use, as others report it."""
        kept = self._kept.get(key)
        if kept is not None and (kept.in_flight, kept.active_until) != (in_flight, until):
            kept.in_flight, kept.active_until = in_flight, until
            if kept.known is not None and key not in self._looks:
                self._publish(kept)

    def set_waits(self, key: Key, reason: str) -> None:
        """Note what a container waits for before it takes memory on its GPUs, "" when it waits no longer."""
        kept = self._kept.get(key)
        if kept is not None and kept.waits_for != reason:
            kept.waits_for = reason
            if kept.known is not None and key not in self._looks:
                self._publish(kept)

    # -- what containerd says -----------------------------------------------------------------------------------------

    async def _take(self, notice: Connected | Lost | Notice) -> None:
        match notice:
            case Connected():
                if self.ready.is_set() and not self._connected:
                    self._note("containerd.found", "info", "containerd answers again")
                self._connected = True
                self._followed_since_ns = time.time_ns()
                self._resync = self._now() + SETTLED_SECONDS
                await self._look_at_all()
            case Lost(reason):
                if self._connected:
                    self._note("containerd.lost", "warning", f"containerd is away; containers keep running: {reason}")
                self._connected, self._followed_since_ns = False, 0
            case Notice():
                self._take_notice(notice)

    def _take_notice(self, notice: Notice) -> None:
        key = notice.namespace, notice.id
        kept = self._kept.setdefault(key, _Kept())
        if notice.deleted_pid:
            kept.deleted = notice.deleted_pid, self._now()
        title = kept.known.container.title if kept.known is not None else notice.id
        if notice.topic == ENDED:
            self._record_end(kept, notice, title)
        labels = notice.labels
        if notice.topic == STARTED:
            self._written.pop((*key, labels.get("image", "")), None)  # it is removed and written once more
            happened = operation_started(title, labels.get("verb", ""), labels.get("image", ""))
            if happened is not None:
                self._record(notice.namespace, notice.id, happened, image=labels.get("image", ""))
        if notice.topic == SKIPPED:
            happened = restore_skipped(labels.get("container", ""), labels.get("of", ""), labels.get("image", ""))
            self._record(notice.namespace, notice.id, happened, image=labels.get("image", ""))
        self.touch(*key)

    def _record_end(self, kept: _Kept, notice: Notice, title: str) -> None:
        verb, outcome = notice.labels.get("verb", ""), notice.labels.get("outcome", "")
        image = notice.labels.get("image", "")
        happened = operation_ended(title, verb, outcome, image, notice.labels.get("error", ""))
        if outcome == "done" and verb in STATES:
            if kept.gpu_noted == STATES[verb]:
                return  # a look was faster
            kept.gpu_noted = STATES[verb]
        if outcome == "done" and verb == "checkpoint" and not self._is_first(notice.namespace, notice.id, image):
            return  # the agent's operation was faster
        if happened is not None:
            figures = {name: notice.labels[name] for name in FIGURES if name in notice.labels}
            self._record(notice.namespace, notice.id, happened, image=image, **figures)

    def _is_first(self, namespace: str, id: str, image: str) -> bool:
        """Return whether there is no event of an image yet, and remember that there is one now."""
        key = namespace, id, image
        if not image:
            return True
        if key in self._written:
            return False
        self._written[key] = None
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        return True

    async def _look_at_all(self) -> None:
        try:
            names = await self._containerd.namespaces()
            there = {(name, id) for name in names for id in await self._containerd.ids(name)}
        except (ContainerdUnreachable, ContainerdRefused) as error:
            self._log.warning("inventory.not_listed", error=str(error))  # the stream ends, too, and all is listed again
            return
        for key in there | self._kept.keys():
            self.touch(*key)
        if not self.ready.is_set():
            await self._read(there)
            self.ready.set()

    async def _read(self, keys: set[Key]) -> None:
        """Wait until each of these containers has been looked at, however often containerd goes away meanwhile."""
        while keys:
            looks = {key: look for key in keys if (look := self._looks.get(key)) is not None}
            if looks:
                await asyncio.wait(looks.values())
            keys = {key for key, look in looks.items() if not look.result()}
            if keys:
                await asyncio.sleep(STEP_SECONDS)
                for key in keys:
                    self.touch(*key)

    async def _poll(self) -> None:
        """Look at what is due."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if self._now() >= self._resync:
                self._resync = self._now() + RESYNC_SECONDS
                for key in list(self._kept):
                    self.touch(*key)
            for key in [key for key, kept in self._kept.items() if kept.due and kept.due <= self._now()]:
                self._kept[key].due = 0.0
                self.touch(*key)

    # -- looking ------------------------------------------------------------------------------------------------------

    async def _look_until_settled(self, key: Key) -> bool:
        """Look, again where something has changed meanwhile; return False where containerd was away."""
        kept = self._kept[key]
        try:
            kept.again = True
            while kept.again:
                kept.again = False
                async with self._silent if kept.reported.problem else self._quick:
                    await self._look(key, kept)
        except ContainerdUnreachable:
            return False  # all is looked at again when it is back
        except Exception as error:  # noqa: BLE001  # one container must not end the others' inventory
            self._log.error("inventory.not_updated", task=key[1], error=repr(error))
            kept.due = self._now() + LONGEST_POLL_SECONDS
        finally:
            del self._looks[key]
            if kept.known is None and not kept.due:
                self._kept.pop(key, None)
        return True

    async def _look(self, key: Key, kept: _Kept) -> None:
        kept.due = 0.0
        record: containers_pb2.Container | None
        try:
            record = await self._containerd.container(*key)
        except RecordTooLarge:
            task, problem = await self._task(key, kept)
            one = Known(nameless(*key, task))
            reported = Reported(problem=one.container.problem)
        else:
            if record is None:
                self._remove(kept)
                self._gone[key] = None
                while len(self._gone) > MOST_GONE:
                    del self._gone[next(iter(self._gone))]
                return
            self._gone.pop(key, None)
            task, problem = await self._task(key, kept)
            spec = await asyncio.to_thread(spec_of, record) if is_large(record) else spec_of(record)
            one = known(key[0], record, task, await self._pod_labels(key, record, kept, spec), spec)
            if problem:
                reported = Reported(problem=problem, foreign=not named_kybernate(one.container))
            else:
                reported = await self._query(one, kept)
        kept.failures = kept.failures + 1 if reported.problem else 0
        first = kept.known is None and not self.ready.is_set()
        kept.known, kept.task, kept.reported = one, task, reported
        self._schedule(kept)
        self._publish(kept, quiet=first)

    async def _task(self, key: Key, kept: _Kept) -> tuple[process_pb2.Process | None, str]:
        """Return the task, and why it is not known; a task whose end containerd has announced is none any more."""
        try:
            task = await self._containerd.task(*key)
        except ContainerdRefused as error:  # its shim does not answer
            return kept.task, str(error)
        pid, since = kept.deleted
        if task is not None and task.pid and task.pid == pid and self._now() - since < LINGER_SECONDS:
            kept.due = self._now() + CONFIRM_SECONDS
            return None, ""
        return task, ""

    async def _query(self, one: Known, kept: _Kept) -> Reported:
        """Ask the shim, where there is a task, and the shim may be ours."""
        container, last = one.container, kept.known
        if container.state == api.Container.NO_TASK:
            return Reported(foreign=not named_kybernate(container))
        if kept.reported.foreign and last is not None and last.container.pid == container.pid and kept.task is not None:
            return kept.reported
        return await self._ask(container, self._containerd.address)

    async def _pod_labels(
        self, key: Key, record: containers_pb2.Container, kept: _Kept, spec: Spec
    ) -> Mapping[str, str]:
        """Return the labels of the container's pod, which its sandbox has."""
        if record.labels.get(KIND) == "sandbox":
            of_pods = {name: record.labels[name] for name in OF_PODS if name in record.labels}
            kept.pod_labels = shown_labels(record.labels) | of_pods
            return kept.pod_labels
        group = group_of(record.id, spec)
        if group == record.id:
            return {}
        sandbox = self._kept.get((key[0], group))
        if sandbox is not None and sandbox.known is not None:
            return sandbox.pod_labels
        try:
            found = await self._containerd.container(key[0], group)
        except RecordTooLarge:
            return {}
        return found.labels if found is not None else {}

    def _schedule(self, kept: _Kept) -> None:
        seconds = poll_seconds(kept.reported, kept.failures)
        if seconds is not None:
            kept.due = self._now() + seconds

    # -- telling ------------------------------------------------------------------------------------------------------

    def _publish(self, kept: _Kept, *, quiet: bool = False) -> None:
        """Put the container into the hub, and record what has happened to it unless that is `quiet`."""
        assert kept.known is not None
        container = kept.known.container
        if container.pid != kept.started[0]:
            kept.started = container.pid, _began(container.pid)
            kept.pod_ip = pod_ip(container.pid) if container.pod else ""
        message = message_of(
            kept.known,
            kept.reported,
            started_ns=kept.started[1],
            gpu_uuids=kept.gpu_uuids,
            had_gpu=bool(kept.gpu_noted),
            pod_ip=kept.pod_ip,
            in_flight=kept.in_flight,
            active_until=kept.active_until,
            waits_for=kept.waits_for,
        )
        old = self._hub.get("container", f"{container.namespace}/{container.id}")
        self._hub.put(message)
        moved = gpu_moved(kept.gpu_noted, message)
        if message.gpu in STATES.values() or container.state == api.Container.NO_TASK:
            kept.gpu_noted = message.gpu  # of another task, nothing is known
        if quiet:
            return
        for happened in [*happenings(old, message), *([moved] if moved is not None else [])]:
            self._record(container.namespace, container.id, happened)

    def _remove(self, kept: _Kept) -> None:
        if kept.known is None:
            return
        container = kept.known.container
        kept.known = kept.task = None
        old = self._hub.get("container", f"{container.namespace}/{container.id}")
        if old is not None:
            self._hub.remove(old)
            for happened in happenings(old, None):
                self._record(container.namespace, container.id, happened)

    def _record(self, namespace: str, id: str, happened: Happening, **about: str) -> None:
        self._note(happened.type, happened.level, happened.message, namespace=namespace, container=id, **about)


def _began(pid: int) -> int:
    """Return when a process began, in ns since the epoch; 0 where it is gone."""
    try:
        return int(psutil.Process(pid).create_time() * 1e9) if pid else 0
    except psutil.Error:
        return 0

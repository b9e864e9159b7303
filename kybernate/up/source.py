"""The models of a file as the proxy sees them: those that the agent knows, and those whose program comes back first.

A model that is on disk, that loads, or whose program has ended is asleep for the proxy: a request waits for it, and it
comes back. It works for the proxy once the keeper says that it is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from kybernate.client.asynchronous import AsyncAgent
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure, Unavailable
from kybernate.proxy.agent_models import AgentModels
from kybernate.proxy.engine import Engine
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import WakeFailed
from kybernate.proxy.settings import Model
from kybernate.up.keeper import Keeper
from kybernate.up.lifecycle import Step
from kybernate.up.models_file import Entry
from kybernate.up.room import LOOK_SECONDS, Gpu, Holder

IN_WINDOW: Final = 1_000_000  # is added to the priority of a model
WINDOW_SECONDS: Final = 5.0  # between two looks at the clock
AWAY_SECONDS: Final = 15.0  # for which a model that made room in its window leaves it to the other one at least
WAKES: Final = 3  # attempts for one request
AGAIN_SECONDS: Final = 0.2  # between a wake that failed and the next
SUSPEND_SECONDS: Final = 120.0  # after the last request
AT_WORK: Final = (Phase.AWAKE, Phase.DRAINING, Phase.SUSPENDING)


class KeptModels:
    """Models for a proxy. `engine` is the proxy's, once there is one; `keeper` has the room."""

    def __init__(self, agent: AsyncAgent, keeper: Keeper, models: Sequence[Model]) -> None:
        self.keeper = keeper
        self._agent = AgentModels(agent, models)
        self._phases: dict[str, Phase] = {}
        self._queue: asyncio.Queue[str | Failure] = asyncio.Queue()
        self.engine: Engine | None = None
        self.seat_is_crowded: Callable[[str, str], bool] = lambda profile, container: False  # by the agent's arbiter
        self._began = asyncio.get_running_loop().time()
        self._woken: set[str] = set()  # for the window that they are in
        self._made_room: dict[str, float] = {}  # when

    async def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        """Yield phases as `Models.watch`. Raises as AgentModels does."""
        self.keeper.steps.settled = self._queue.put_nowait
        self.keeper.steps.slept, self.keeper.steps.woke = self._slept, self._woke
        pump = asyncio.create_task(self._pump())
        try:
            while True:
                match await self._queue.get():
                    case Failure() as failure:
                        raise failure
                    case name if name in self._phases:
                        yield name, self._shown(name)
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def _pump(self) -> None:
        try:
            async for name, phase in self._agent.watch():
                self._phases[name] = phase
                self.keeper.room.changed()
                if phase is Phase.ABSENT:
                    self.keeper.look()
                self._queue.put_nowait(name)
        except Failure as failure:
            self._queue.put_nowait(failure)

    def _slept(self, name: str) -> None:
        if name in self._phases:
            self._phases[name] = Phase.ASLEEP

    def _woke(self, name: str) -> None:
        if name in self._phases:
            self._phases[name] = Phase.AWAKE  # it has its room, before the Watch says so

    def _shown(self, name: str) -> Phase:
        phase = self._phases[name]
        ready = name in self.keeper.models and self.keeper.models[name].done.settled
        return phase if ready and phase is not Phase.ABSENT else Phase.ASLEEP

    async def wake(self, model: Model) -> None:
        """Have a model work: its program is started, and others put to sleep, where needed. Raises WakeFailed."""
        for left in range(WAKES, 0, -1):
            started = False
            try:
                async with self.keeper.brought_up(model.name) as kept:
                    started = True
                    if self._phases.get(model.name) is not Phase.AWAKE:
                        await self._wake_with(model, kept.entry, kept.vram if left == WAKES else None)
                return
            except Failure as failure:
                if left == 1 or not started:
                    raise WakeFailed(str(failure), state=failure.state, advice=failure.advice) from failure
                # Its program may have ended, or its size be another one: then all others leave.
                await asyncio.sleep(AGAIN_SECONDS)
                await self.keeper.look_at(model.name)

    async def _wake_with(self, model: Model, entry: Entry, needed: int | None) -> None:
        devices = self.keeper.room.decided_here(entry.devices, entry.seat)
        async with self.keeper.room.taken(entry.name, devices, needed, seconds=model.wake_timeout):
            await self._agent.wake(model)
            self._phases[model.name] = Phase.AWAKE  # which the Watch may say a little later

    async def report(self, model: Model, in_flight: int) -> bool:
        """Report as `Models.report`. Raises Failure."""
        return await self._agent.report(model, in_flight)

    async def suspend(self, model: Model, *, unless_used: bool) -> None:
        """Suspend a model as `Models.suspend`. Raises SuspendFailed."""
        try:
            await self._agent.suspend(model, unless_used=unless_used)
            self._phases[model.name] = Phase.ASLEEP  # which the Watch may say a little later, or not again
        finally:
            self.keeper.room.changed()

    async def put_to_sleep(self, name: str) -> None:
        """Suspend a model once its requests have ended. Raises Unavailable where they do not end in time."""
        assert self.engine is not None
        held = self.engine.held[name]
        self.engine.want_suspended(name, makes_way=True)
        end = time.monotonic() + held.model.drain + SUSPEND_SECONDS
        while held.phase in AT_WORK:
            if not held.suspend_wanted and held.phase is Phase.AWAKE:
                raise Unavailable(f"{name} was not suspended: its requests did not end", state="it works on")
            if time.monotonic() > end:
                raise Unavailable(f"{name} is not suspended yet", state=f"it is {held.phase}")
            await asyncio.sleep(LOOK_SECONDS)

    # -- what the room asks

    def holders(self) -> list[Holder]:
        """Return the models that are awake, but for those of which the agent's arbiter decides."""
        if self.engine is None:
            return []
        now, found = asyncio.get_running_loop().time(), []
        for name, held in self.engine.held.items():
            kept = self.keeper.models.get(name)
            at_work = held.phase in AT_WORK or self._phases.get(name, Phase.ABSENT) not in (Phase.ASLEEP, Phase.ABSENT)
            if kept is None or not at_work or not kept.done.settled:
                continue
            devices = self.keeper.room.decided_here(kept.entry.devices, kept.entry.seat)
            if not (gpus := self.keeper.room.of(devices)):
                continue
            used = time.monotonic() - (now - held.busy_until) if held.busy_until > 0 else 0.0
            busy = held.in_flight > 0 or bool(held.waiting)
            priority = kept.entry.priority + (IN_WINDOW if in_window(kept.entry) else 0)
            found.append(Holder(name, gpus, kept.vram, used, busy, priority))
        return found

    def idle(self, name: str) -> float:
        """Return for how many seconds a model has been asleep without a request; 0 where it is not."""
        held = self.engine.held.get(name) if self.engine is not None else None
        if held is None or held.phase is not Phase.ASLEEP or held.waiting:
            return 0.0
        return asyncio.get_running_loop().time() - max(held.busy_until, self._began)

    async def keep_windows(self) -> None:
        """Keep models awake in their windows, and wake them when these begin, or have made room, without an end."""
        while True:
            for name, kept in self.keeper.models.items():
                inside, held = in_window(kept.entry), self.engine.held.get(name) if self.engine is not None else None
                if held is None or not inside:
                    self._woken.discard(name)
                elif held.phase is Phase.AWAKE:
                    held.busy_until = asyncio.get_running_loop().time()
                elif name not in self._woken and kept.done.settled and not self._is_kept_away(name):
                    self._woken.add(name)
                    with suppress(Failure):  # it is tried again by its first request
                        await self.wake(held.model)
            await asyncio.sleep(WINDOW_SECONDS)

    def _is_kept_away(self, name: str) -> bool:
        """Return whether a model waits in its window for one that needed its room, or that has requests."""
        away = time.monotonic() - self._made_room.get(name, float("-inf"))
        return away < AWAY_SECONDS or self.crowded(name)

    def leave(self, name: str) -> None:
        """Have a model put to sleep, for another one. In its window it comes back when that one has no requests."""
        self._woken.discard(name)
        self._made_room[name] = time.monotonic()
        if self.engine is not None:
            self.engine.want_suspended(name, makes_way=True)

    def crowded(self, name: str) -> bool:
        """Return whether a model that sleeps could wake only if another one left that has requests."""
        kept, room = self.keeper.models.get(name), self.keeper.room
        if kept is None:
            return False
        if kept.entry.seat and room.seats():
            return self.seat_is_crowded(kept.entry.seat, kept.container)
        return room.crowded(name, room.decided_here(kept.entry.devices, kept.entry.seat), kept.vram)

    def upstream_of(self, model: Model) -> str:
        """Return where a model is now: a pod with a network of its own has another address after each start."""
        kept = self.keeper.models.get(model.name)
        return model.upstream if kept is None else f"http://{kept.address}:{kept.entry.port}"

    # -- what people ask

    def state(self, name: str) -> str:
        """Return a model's state in a word."""
        kept = self.keeper.models[name]
        if not kept.done.settled or kept.step is not Step.NONE:
            return str(kept.step if kept.step is not Step.NONE else Step.START)
        return str(self.engine.held[name].phase) if self.engine is not None else str(Phase.ASLEEP)

    def listed(self) -> list[dict[str, Any]]:
        """Return all models as documents."""
        found = []
        for name, kept in self.keeper.models.items():
            held = self.engine.held.get(name) if self.engine is not None else None
            entry = kept.entry
            idle = asyncio.get_running_loop().time() - held.busy_until if held and held.busy_until > 0 else None
            found.append(
                {
                    "model": name,
                    "aliases": list(entry.aliases),
                    "state": self.state(name),
                    "image": entry.image,
                    "command": list(entry.command),
                    "port": entry.port,
                    "gpus": list(entry.devices),
                    "vram_bytes": kept.vram,
                    "template": kept.template,
                    "in_flight": held.in_flight if held else 0,
                    "waiting": len(held.waiting) if held else 0,
                    "crowded": held is not None and held.phase is not Phase.AWAKE and self.crowded(name),
                    "idle_seconds": round(idle, 1) if idle is not None else None,
                    "wake_seconds": round(self.engine.usual_wake(name), 3) if self.engine else 0.0,
                    "failures": kept.done.failures,
                    "problem": kept.problem,
                }
            )
        return found


def in_window(entry: Entry) -> bool:
    """Return whether it is a time at which a model is to be awake, by the node's clock."""
    now = datetime.now().astimezone()
    return any(window.holds(now.weekday(), now.hour * 60 + now.minute) for window in entry.windows)


async def gpus_of(agent: AsyncAgent) -> list[Gpu]:
    """Return the node's GPUs."""
    return numbered((await agent.node()).gpus)


def numbered(gpus: Iterable[wire.Gpu]) -> list[Gpu]:
    """Return GPUs by the numbers that CDI names have: the order of PCI addresses, as NVML's.

    The agent's `index` is that of the device node, which can be another one.
    Source: `nvidia-ctk cdi generate` of NVIDIA's container toolkit.
    """
    ordered = sorted(gpus, key=lambda one: one.pci_address)
    return [Gpu(one.uuid, number, one.total_bytes, one.used_bytes) for number, one in enumerate(ordered)]

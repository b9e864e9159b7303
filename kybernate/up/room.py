"""Room on the GPUs for the models of one file: who has it, who waits for it, and who leaves to make it.

Models with a seat are not among them where the node's agent has seats: its arbiter decides about those, and what they
hold is memory of others here.

Sizes are those that were seen when a model was suspended, or that its template has. What other programs hold is what
the driver reports beyond them at a quiet moment, so that a switch does not wait for a measurement. Until there was one,
it is all that is not of models known to be awake.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from kybernate.node.failure import Unavailable
from kybernate.seats.matrix import Matrix

LOOK_SECONDS: Final = 0.05  # between two looks at models that were asked to leave
QUIET_SECONDS: Final = 1.5  # after the last change, until what the driver reports is what there is
SETTLE_FACTOR: Final = 1.0  # a model with requests keeps its room for as long as its wake took, times this
Gpus = frozenset[str]
Devices = Iterable[str]  # CDI names
WhyNot = Callable[[Sequence["Holder"]], str]  # why one does not wait for these to leave; "" where it does


@dataclass(frozen=True)
class Gpu:
    """A GPU: its UUID, its number in CDI names, and its memory in bytes."""

    uuid: str
    index: int
    total: int
    used: int


@dataclass(frozen=True)
class Holder:
    """A model that is awake: its GPUs, the bytes that it has on each (None: unknown), and how busy it is."""

    name: str
    gpus: Gpus
    bytes: int | None
    last_used: float
    busy: bool = False
    priority: int = 0


def free_on(gpu: Gpu, foreign: int, holders: Iterable[Holder]) -> int:
    """Return the bytes that nothing has on a GPU; 0 where a model has an unknown part of it."""
    there = [one for one in holders if gpu.uuid in one.gpus]
    if any(one.bytes is None for one in there):
        return 0
    return max(0, gpu.total - foreign - sum(one.bytes or 0 for one in there))


def leaving(
    gpus: Iterable[Gpu],
    foreign: Mapping[str, int],
    holders: Sequence[Holder],
    needed: int | None,
    barred: Collection[str] = (),
) -> Sequence[Holder]:
    """Return the models that have to leave for one that needs so many bytes on each of these GPUs; fewest that do.

    Those that are `barred` leave in any case: they may not be awake with it.

    Those without requests leave before those with some, lower priorities before higher ones, and among equals the one
    that was used least lately. `needed` None is not known: all leave.
    """
    wanted = list(gpus)
    stay = [one for one in holders if one.name not in barred]
    found = [one for one in holders if one.name in barred]
    order = sorted(holders, key=lambda one: (one.busy, one.priority, one.last_used))
    for gpu in wanted:
        while any(gpu.uuid in one.gpus for one in stay) and (
            needed is None or free_on(gpu, foreign.get(gpu.uuid, 0), stay) < needed
        ):
            first = next(one for one in order if one in stay and gpu.uuid in one.gpus)
            stay.remove(first)
            found.append(first)
    return found


@dataclass
class Room:
    """The one owner of room on the GPUs for a file's models without a seat.

    `look` returns the GPUs now, `holders` the models that are awake; `leave` asks one to leave. `seats` returns whether
    the agent has seats.
    """

    look: Callable[[], Awaitable[Sequence[Gpu]]]
    holders: Callable[[], Sequence[Holder]]
    leave: Callable[[str], object]
    seats: Callable[[], bool] = lambda: False
    gpus: Sequence[Gpu] = ()
    foreign: dict[str, int] = field(default_factory=dict)
    matrix: Matrix | None = None
    _taking: list[Holder] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: float = 0.0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _until: dict[str, float] = field(default_factory=dict)  # when each model may be asked to leave

    def decided_here(self, devices: Devices, seat: str) -> Devices:
        """Return the devices on which a model needs room of this owner: none where the arbiter gives it its seat."""
        return () if seat and self.seats() else devices

    def of(self, devices: Devices) -> Gpus:
        """Return the UUIDs of the GPUs that CDI names mean, as far as they are known."""
        found = set()
        for device in devices:
            one = device.rpartition("=")[2]
            found |= {gpu.uuid for gpu in self.gpus if one in ("all", str(gpu.index), gpu.uuid)}
        return frozenset(found)

    async def measure(self) -> None:
        """Look at the GPUs; what other programs hold is noted where all of ours is at rest, and the first time."""
        self.gpus = await self.look()
        rests = not self._taking and time.monotonic() - self._changed >= QUIET_SECONDS
        holders = self.holders()
        for gpu in self.gpus:
            if gpu.uuid in self.foreign and not rests:
                continue
            there = [one for one in holders if gpu.uuid in one.gpus]
            if all(one.bytes is not None for one in there):
                self.foreign[gpu.uuid] = max(0, gpu.used - sum(one.bytes or 0 for one in there))

    def changed(self) -> None:
        """Note that a model has taken room, or left it."""
        self._changed = time.monotonic()
        self._moved.set()

    def short(self, devices: Devices, needed: int | None) -> bool:
        """Return whether the driver had less memory free than needed when it was last looked at."""
        there = [gpu for gpu in self.gpus if gpu.uuid in self.of(devices)]
        return needed is not None and any(gpu.total - gpu.used < needed for gpu in there)

    def crowded(self, name: str, devices: Devices, needed: int | None) -> bool:
        """Return whether a model has room only if one leaves that has requests."""
        gpus = [gpu for gpu in self.gpus if gpu.uuid in self.of(devices)]
        return bool(gpus) and any(one.busy for one in self._leaving(name, gpus, needed))

    def _leaving(self, name: str, gpus: Sequence[Gpu], needed: int | None) -> Sequence[Holder]:
        others = self._others(name)
        barred = self.matrix.to_evict(name, [one.name for one in others]) if self.matrix is not None else ()
        return leaving(gpus, self.foreign, others, needed, barred)

    @asynccontextmanager
    async def taken(
        self,
        name: str,
        devices: Devices,
        needed: int | None,
        *,
        seconds: float,
        why_not: WhyNot = lambda in_way: "",
        has_it: bool = False,
    ) -> AsyncIterator[str]:
        """Have the models leave that are in the way, and hold the room while the block takes it. Raises Unavailable.

        `seconds` is how long to wait for requests of others to end. `why_not` is asked while others are in the way:
        what it answers is yielded, and no room is held then. For one that `has_it` already, none leaves.
        """
        if not self.gpus:
            await self.measure()
        if not (gpus := self.of(devices)):
            yield ""
            return
        end = time.monotonic() + seconds
        async with self._turn:  # one after the other: two that look at the same room would both take it
            why = "" if has_it else await self._make(name, gpus, needed, end, why_not)
            began = time.monotonic()
            claim = Holder(name, gpus, needed, began, busy=True)
            if not why:
                self._taking.append(claim)
        if why:
            yield why
            return
        try:
            yield ""
        finally:
            self._taking.remove(claim)
            self.changed()
            now = time.monotonic()
            self._until[name] = now + SETTLE_FACTOR * (now - began)

    def _others(self, name: str) -> list[Holder]:
        known = {one.name: one for one in (*self.holders(), *self._taking)}
        return [one for one in known.values() if one.name != name]

    async def _make(self, name: str, gpus: Gpus, needed: int | None, end: float, why_not: WhyNot) -> str:
        wanted = [gpu for gpu in self.gpus if gpu.uuid in gpus]
        asked: set[str] = set()
        while found := self._leaving(name, wanted, needed):
            now = time.monotonic()
            taking = {one.name for one in self._taking}
            if why := why_not([one for one in found if one.name not in taking]):
                return why
            if now > end:
                raise Unavailable(
                    f"{name} has no room: {', '.join(one.name for one in found)} did not leave in time",
                    advice="their requests take long; try again later, or give them a smaller `concurrency`",
                )
            for one in found:
                may = one.name in asked or not one.busy or now >= self._until.get(one.name, 0.0)
                if one.name not in taking and may:
                    asked.add(one.name)
                    self.leave(one.name)
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._moved.wait()
        return ""

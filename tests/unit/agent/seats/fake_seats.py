"""A node with seats and without anything real: containers, their shims, NVML and room, as the arbiter sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kybernate.agent.inventory.gpus import Activity, Sight
from kybernate.agent.room import RoomOwner
from kybernate.agent.seats.acting import Outcome
from kybernate.agent.seats.arbiter import Arbiter
from kybernate.agent.seats.around import Around
from kybernate.agent.seats.claims import Claim, Key
from kybernate.messages import agent_pb2 as wire
from kybernate.seats.groups import Group, Place, Profile
from kybernate.seats.model import Rules, Seat, Turn
from kybernate.verbs.room import Taker
from kybernate_shim.gpu.helper_answers import NodeGpu

GIB = 1 << 30
ONE = Profile("one", "kyb.ai/one", 1, 4)
RULES = Rules(minimum_residency=0, slice=0.05, yield_after=0, idle_after=0, ram_low=0, ram_high=0, backoff=0.01)


def places(gpus: int = 1, seats: int = 4) -> list[Place]:
    groups = [Group(f"G{index}", (index,)) for index in range(gpus)]
    return [Place(f"g{index}-s{number}", ONE, groups[index]) for index in range(gpus) for number in range(seats)]


@dataclass
class FakeNode:
    """Each container takes a GiB of the GPU of its seat while it is attached."""

    gpus: int = 1
    size: int = 4 * GIB
    known: dict[Key, wire.Container] = field(default_factory=dict)
    claimed: dict[Key, Claim] = field(default_factory=dict)
    holding: dict[Key, int] = field(default_factory=dict)  # the GPU
    failing: set[str] = field(default_factory=set)
    said: list[tuple[str, str]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    most_together: int = 0
    seats: dict[str, Seat] = field(default_factory=dict)
    turns: dict[str, Turn | None] = field(default_factory=dict)
    crowded: set[str] = field(default_factory=set)  # seats
    under_way: set[asyncio.Task[Outcome]] = field(default_factory=set)
    labels: dict[Key, str] = field(default_factory=dict)
    arbiter: Arbiter | None = None
    silent: bool = False  # the driver does not answer
    looks: int = 0  # at it
    away: bool = False  # containerd does not
    holding_up: bool = False  # changes do not end
    own: set[str] = field(default_factory=set)  # operations that an arbiter has begun
    swaps: dict[str, Key] = field(default_factory=dict)  # operations of others, and the container that leaves by them
    asked: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    shown: dict[Key, bool] = field(default_factory=dict)  # whether programs may begin with CUDA
    marks: dict[Key, int] = field(default_factory=dict)  # of what containers have computed
    resting: set[Key] = field(default_factory=set)  # those of which the newest sample shows no work

    def __post_init__(self) -> None:
        self.room = RoomOwner(lambda *arguments, **about: None)

    # ---- what tests do

    def add(self, name: str, gpu: str = "suspended", *, seat: str = "", profile: str = "", **more: Any) -> Key:
        key = ("k8s.io", name)
        self.claimed[key] = Claim(seat, profile, **more)
        self.known[key] = wire.Container(
            namespace=key[0],
            id=name,
            title=name,
            name=name,
            gpu=gpu.upper() or "NO_GPU",
            pid=1,
            state=wire.Container.RUNNING if gpu else wire.Container.CREATED,
        )
        if gpu == "attached":
            self._hold(key)
        self.changed()
        return key

    def end(self, key: Key) -> None:
        self.known[key].state = wire.Container.STOPPED
        self.holding.pop(key, None)
        self.changed()

    def changed(self) -> None:
        if self.arbiter is not None:
            self.arbiter.wake()

    async def start(self, key: Key) -> None:
        """Start a created container as its shim does."""
        async with self.room.taken(Taker(*key), lambda reason: None):
            pass
        self.known[key].state, self.known[key].gpu = wire.Container.RUNNING, wire.Container.ATTACHED
        self._hold(key)
        self.changed()

    def status(self, key: Key) -> str:
        assert self.arbiter is not None
        seat = self.arbiter.seat_of(key)
        return str(seat.status) if seat is not None else ""

    @asynccontextmanager
    async def arbitrating(self, rules: Rules = RULES, seats: int = 4, **more: Any) -> AsyncIterator[Arbiter]:
        self.arbiter = arbiter = Arbiter(places(self.gpus, seats), rules, self._around(), **more)
        self.room.grant, self.room.seated = arbiter.grant, arbiter.is_seated
        task = asyncio.create_task(arbiter.run())
        try:
            yield arbiter
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            raise AssertionError("the arbiter has failed") from task.exception()

    # ---- what the arbiter sees

    def claims(self) -> dict[Key, Claim]:
        return self.claimed

    def touch(self, namespace: str, id: str) -> None: ...

    def is_gone(self, namespace: str, id: str) -> bool:
        return id == "gone"

    async def looked_at(self, namespace: str, id: str) -> bool:
        return not self.away

    async def look(self) -> Sight | None:
        await asyncio.sleep(0)
        self.looks += 1
        if self.silent:
            return None
        used = [sum(GIB for one in self.holding.values() if one == index) for index in range(self.gpus)]
        found = [
            NodeGpu(f"GPU-{index}", "H", self.size, self.size - used[index], False, index) for index in range(self.gpus)
        ]
        held = {key: {f"GPU-{gpu}": GIB} for key, gpu in self.holding.items()}
        doing = {key: Activity(mark, works=key not in self.resting) for key, mark in self.marks.items()}
        return Sight(found, held, doing, {key: frozenset({number}) for number, key in enumerate(sorted(held), 1)})

    def _around(self) -> Around:
        async def label(key: Key, seat: str) -> None:
            self.labels[key] = seat

        def publish(seat: Seat, key: Key | None, turn: Turn | None, error: str, crowded: bool) -> None:
            self.seats[seat.name], self.turns[seat.name] = seat, turn
            (self.crowded.add if crowded else self.crowded.discard)(seat.name)

        return Around(
            containers=self,
            container=self.known.get,
            look=self.look,
            waiting=lambda: self.room.waiting,
            taking=lambda: self.room.taking,
            look_again=self.room.look_again,
            acts=self,
            note=lambda type, level, message, /, **about: self.said.append((type, message)),
            publish=publish,
            free_memory=lambda: (1 << 50, 1 << 50),
            label=label,
            priority=lambda one: None,
            is_own=self.own.__contains__,
            leaves=self.swaps.get,
            show_turns=self.show,
        )

    def show(self, turns: Mapping[Key, bool]) -> None:
        self.shown = dict(turns)

    # ---- its acts

    async def wake(self, seat: str, key: Key) -> Outcome:
        return await self._change(key, "resuming", "attached")

    async def suspend(self, seat: str, key: Key, *, again: bool = False) -> Outcome:
        if seat:
            self.asked.append("suspend")
        return await self._change(key, "suspending", "suspended")

    async def swap(self, seat: str, out: Key, key: Key, *, again: bool = False) -> Outcome:
        left = await self.suspend(seat, out)
        return await self.wake(seat, key) if left.succeeded else left

    async def park(self, seat: str, key: Key) -> Outcome:
        return Outcome(False, "no tier below host memory")

    async def ended(self, operation: str) -> Outcome:
        if (out := self.swaps.get(operation)) is not None:
            return await self.swap("", out, ("k8s.io", operation))
        return await self._change(("k8s.io", operation), "resuming", "attached")

    async def cancel(self, operation: str) -> None:
        self.cancelled.append(operation)

    async def _change(self, key: Key, during: str, then: str) -> Outcome:
        """Do it, as a shim does whose caller has gone."""
        task = asyncio.create_task(self._changed(key, during, then))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return await asyncio.shield(task)

    async def _changed(self, key: Key, during: str, then: str) -> Outcome:
        before = self.known[key].gpu
        self.known[key].gpu = wire.Container.GpuState.Value(during.upper())
        await asyncio.sleep(0.001)
        while self.holding_up:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.001)
        if self.known[key].state == wire.Container.STOPPED:
            return Outcome(False, "its container has ended")
        if key[1] in self.failing:
            self.known[key].gpu = before
            return Outcome(False, "the driver has refused")
        self.known[key].gpu = wire.Container.GpuState.Value(then.upper())
        self.done.append(f"{then} {key[1]}")
        if then == "attached":
            self._hold(key)
        else:
            self.holding.pop(key, None)
        return Outcome(True, seconds=0.001)

    def _hold(self, key: Key) -> None:
        seat = self.arbiter.seat_of(key) if self.arbiter is not None else None
        name = seat.name if seat is not None else self.claimed[key].seat or "g0"
        self.holding[key] = int(name[1])
        self.most_together = max(self.most_together, list(self.holding.values()).count(int(name[1])))


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # the arbiter has no event for tests
            await asyncio.sleep(0.002)

"""A discrete clock over the arbiter's decisions: arrivals, work, suspends and wakes on nodes of GPUs.

Every seat is on one GPU. A node is simulated by itself, since nodes share nothing. A seat works on its requests one
after another while it is active; what was suspended in the middle of one continues with the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Final

from kybernate.seats.decide import decide
from kybernate.seats.model import NEVER, Gpu, Refuse, Request, Rules, Seat, Start, State, Status, Suspend, Swap
from kybernate.seats.outcomes import begun, done, requested
from kybernate.seats.simulation.traces import Arrival

GIB: Final = 1 << 30
GPUS_OF_NODE: Final = 8
CLASSES: Final = 3  # of priority, by the number of a seat


@dataclass(frozen=True)
class Setup:
    """The nodes' GPUs, and what a switch costs. `bound` is the wait that a good answer does not exceed."""

    gpus: int = 8
    seats: int = 80
    wake_seconds: float = 1.5
    suspend_seconds: float = 1.0
    bound: float = 10.0


@dataclass
class Outcome:
    """What a policy did. `waits` are the seconds until each request was first worked on; `stretch` of each seat is the
    time that its requests took, for each second of their work."""

    policy: str
    waits: list[float] = field(default_factory=list)
    stretch: dict[str, float] = field(default_factory=dict)
    switches: int = 0
    busy_seconds: float = 0.0
    gpu_seconds: float = 0.0
    good: int = 0

    def quantile(self, share: float) -> float:
        return sorted(self.waits)[min(len(self.waits) - 1, int(share * len(self.waits)))] if self.waits else 0.0

    @property
    def utilisation(self) -> float:
        return self.busy_seconds / self.gpu_seconds if self.gpu_seconds else 0.0

    @property
    def goodput(self) -> float:
        return self.good / len(self.waits) if self.waits else 0.0

    @property
    def switches_per_hour(self) -> float:
        """Of one GPU."""
        return self.switches / self.gpu_seconds * 3600 if self.gpu_seconds else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index of the seats' speeds: 1 where all requests are slowed down alike."""
        speeds = [1 / one for one in self.stretch.values()]
        return sum(speeds) ** 2 / (len(speeds) * sum(one * one for one in speeds)) if speeds else 1.0


BASE: Final = Rules(reserve_bytes=0, ram_low=0, ram_high=0, idle_after=0)
POLICIES: Final[Mapping[str, Rules]] = {
    # in the order of arrival, each until its queue is empty
    "fifo": replace(BASE, maximum_wait=NEVER, minimum_residency=0.0, yield_after=0.0, slice=NEVER),
    # a higher class always preempts, and nothing bounds a wait
    "priority": replace(BASE, maximum_wait=NEVER, minimum_residency=0.0, yield_after=0.0, slice=NEVER),
    "kybernate": replace(BASE, yield_after=0.2),
}


def replay(trace: Sequence[Arrival], policy: str, setup: Setup, rules: Rules | None = None) -> Outcome:
    """Return what a policy does with a trace."""
    outcome = Outcome(policy)
    numbers = {f"s{number}": number for number in range(setup.seats)}
    for one in trace:
        numbers.setdefault(one.seat, len(numbers))
    nodes = -(-setup.gpus // GPUS_OF_NODE)
    arrivals: list[list[Arrival]] = [[] for _ in range(nodes)]
    for one in trace:
        arrivals[numbers[one.seat] % setup.gpus // GPUS_OF_NODE].append(one)
    members: list[list[str]] = [[] for _ in range(nodes)]
    for name, number in numbers.items():
        members[number % setup.gpus // GPUS_OF_NODE].append(name)
    end = trace[-1].at if trace else 0.0
    for node in range(nodes):
        gpus = min(GPUS_OF_NODE, setup.gpus - node * GPUS_OF_NODE)
        seats = [_seat(name, numbers[name], gpus, setup, policy) for name in members[node]]
        world = _Node(State.of(_gpus(gpus), seats, rules or POLICIES[policy]), outcome, setup.bound)
        last = world.run(arrivals[node])
        outcome.gpu_seconds += gpus * max(last, end)
    return outcome


def _gpus(count: int) -> Iterable[Gpu]:
    return (Gpu(index, 80 * GIB, 80 * GIB) for index in range(count))


def _seat(name: str, number: int, gpus: int, setup: Setup, policy: str) -> Seat:
    return Seat(
        name,
        "g",
        1 << (number % setup.gpus % GPUS_OF_NODE % gpus),
        Status.SUSPENDED,
        container=name,
        priority=0 if policy == "fifo" else number % CLASSES,
        wake_seconds=setup.wake_seconds,
        suspend_seconds=setup.suspend_seconds,
    )


@dataclass
class _Work:
    """A request of a seat: `left` seconds of work; `begun` is when it was first worked on."""

    at: float
    work: float
    left: float
    begun: float = -1.0


class _Node:
    """One node: its state, its clock, and the requests of its seats."""

    def __init__(self, state: State, outcome: Outcome, bound: float) -> None:
        self._state, self._outcome, self._bound = state, outcome, bound
        self._queues: dict[str, deque[_Work]] = {name: deque() for name in state.seats}
        self._working: dict[str, tuple[int, float]] = {}  # the number of the event that ends it, and since when
        self._events: list[tuple[float, int, str, str, float]] = []
        self._numbers = count()
        self._look_at = NEVER
        self._served: dict[str, tuple[float, float]] = {}

    def run(self, arrivals: Iterable[Arrival]) -> float:
        """Let all requests come and be served; return when the last of them is."""
        for one in arrivals:
            self._later(one.at, "arrival", one.seat, one.work)
        now = 0.0
        while self._events:
            now, number, what, name, value = heappop(self._events)
            if what == "arrival":
                self._arrive(now, name, value)
            elif what == "change":
                self._change(now, name)
            elif what == "work":
                if self._working.get(name, (-1,))[0] != number:
                    continue  # it was suspended meanwhile
                self._finish(now, name)
            elif now < self._look_at:
                continue
            if self._state.waiting:
                self._decide(now)
        for name, (taken, work) in self._served.items():
            self._outcome.stretch[name] = taken / work
        return now

    def _later(self, at: float, what: str, name: str = "", value: float = 0.0) -> int:
        number = next(self._numbers)
        heappush(self._events, (at, number, what, name, value))
        return number

    def _arrive(self, now: float, name: str, work: float) -> None:
        self._queues[name].append(_Work(now, work, work))
        seat = self._state.seats[name]
        if seat.status == Status.ACTIVE:
            self._begin_work(now, name)
        else:
            self._state = self._state.with_seat(requested(seat, Request(now)))

    def _change(self, now: float, name: str) -> None:
        seat = done(self._state.seats[name], now)
        self._state = self._state.with_seat(seat)
        if seat.status == Status.ACTIVE:
            self._begin_work(now, name)

    def _begin_work(self, now: float, name: str) -> None:
        if name in self._working or not self._queues[name]:
            return
        first = self._queues[name][0]
        if first.begun < 0:
            first.begun = now
            self._outcome.waits.append(now - first.at)
            self._outcome.good += now - first.at <= self._bound
        self._working[name] = (self._later(now + first.left, "work", name), now)
        seat = self._state.seats[name]
        if not seat.busy:
            self._state = self._state.with_seat(replace(seat, busy=True))

    def _finish(self, now: float, name: str) -> None:
        first = self._queues[name].popleft()
        self._stop_work(now, name)
        taken, work = self._served.get(name, (0.0, 0.0))
        self._served[name] = (taken + now - first.at, work + first.work)
        if self._queues[name]:
            self._begin_work(now, name)
        else:
            self._state = self._state.with_seat(replace(self._state.seats[name], busy=False, idle_since=now))

    def _stop_work(self, now: float, name: str) -> None:
        _, since = self._working.pop(name)
        self._outcome.busy_seconds += now - since
        if self._queues[name] and self._queues[name][0].begun >= 0:
            self._queues[name][0].left -= now - since

    def _decide(self, now: float) -> None:
        found = decide(self._state, now)
        for action in found.actions:
            self._state = begun(self._state, action, now)
            match action:
                case Suspend(name):
                    self._outcome.switches += 1
                    if name in self._working:
                        self._stop_work(now, name)
                        self._state = self._state.with_seat(replace(self._state.seats[name], busy=False))
                    self._later(now + self._state.seats[name].suspend_seconds, "change", name)
                case Refuse() | Swap():  # no request has a deadline, and no seat overlaps
                    raise AssertionError(action)
                case _:
                    seat = self._state.seats[action.seat]
                    seconds = 0.0 if isinstance(action, Start) else seat.wake_seconds
                    self._later(now + seconds, "change", action.seat)
        if now < found.look_at < NEVER and (found.look_at < self._look_at or self._look_at <= now):
            self._look_at = found.look_at
            self._later(found.look_at, "look")

"""Replays a trace of uses against rules for what stays in memory: LRU, LFU, and ours.

Memory has room for some images; all are in a slower tier. A use of an image in memory is a hit; any other waits for the
slower tier. With LRU and LFU, every image that is used comes into memory. With ours it does if what has to leave for it
is worth less (by `promotion.COLDER`), and images whose use is expected come before it. Temperatures and forecasts are
those of the policy. Watermarks and copies on other tiers, which cost the same with all three, are left out.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, tzinfo
from typing import Final, Protocol

from kybernate.store.policy.forecast import Expected, Uses, expected_on, has_been, remember
from kybernate.store.policy.model import RAM, Rules, TierState
from kybernate.store.policy.promotion import COLDER
from kybernate.store.policy.temperature import expected_rate, rate_of, saved_seconds, temperature
from kybernate.store.simulation.traces import Access


@dataclass(frozen=True)
class Setup:
    """What is simulated: `capacity` bytes of memory, its speed and that of the slower tier, and the rules."""

    capacity: int
    memory: TierState
    slower: TierState
    rules: Rules = field(default_factory=Rules)
    prefetch: bool = True


@dataclass
class Replayed:
    """What became of a trace. `moved_bytes` were read from the slower tier, `prefetched_bytes` of them before a use."""

    policy: str
    uses: int = 0
    hits: int = 0
    used_bytes: int = 0
    hit_bytes: int = 0
    moved_bytes: int = 0
    prefetched_bytes: int = 0
    prefetched: int = 0
    prefetched_in_vain: int = 0
    waited_seconds: float = 0.0

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.uses if self.uses else 0.0


class Replacement(Protocol):
    """Decides what is in memory. The simulation calls `used` for every use, after it was served."""

    def until(self, now: float) -> None:
        """Do what is to be done without a use, up to a time."""

    def ready(self, workload: str) -> float | None:
        """Return since when an image is in memory, or when it will be; None: it is not."""

    def used(self, access: Access) -> None:
        """Take a use into account."""


def replay(trace: Iterable[Access], name: str, setup: Setup) -> Replayed:
    """Return what became of a trace (in the order of time) with one of REPLACEMENTS."""
    outcome = Replayed(name)
    memory = REPLACEMENTS[name](setup, outcome)
    for access in trace:
        memory.until(access.time)
        ready = memory.ready(access.workload)
        outcome.uses += 1
        outcome.used_bytes += access.size
        if ready is not None and ready <= access.time:
            outcome.hits += 1
            outcome.hit_bytes += access.size
        if ready is None:
            outcome.moved_bytes += access.size
            outcome.waited_seconds += setup.slower.seconds(access.size)
        else:
            outcome.waited_seconds += max(0.0, ready - access.time) + setup.memory.seconds(access.size)
        memory.used(access)
    return outcome


@dataclass
class Classic:
    """A replacement that takes in every image, and evicts the lowest by `order` until it fits."""

    setup: Setup
    order: Callable[[Classic, str], tuple[float, float]]
    sizes: dict[str, int] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def until(self, now: float) -> None:
        """Do nothing."""

    def ready(self, workload: str) -> float | None:
        return 0.0 if workload in self.sizes else None

    def used(self, access: Access) -> None:
        self.last[access.workload] = access.time
        self.count[access.workload] += 1
        self.sizes.pop(access.workload, None)
        if access.size > self.setup.capacity:
            return
        free = self.setup.capacity - sum(self.sizes.values()) - access.size
        while free < 0:
            victim = min(self.sizes, key=lambda name: self.order(self, name))
            free += self.sizes.pop(victim)
        self.sizes[access.workload] = access.size


@dataclass
class Known:
    """What ours remembers of a workload: its decayed weight of uses at `last`, and the uses for its forecast."""

    size: int
    first: float
    last: float
    weight: float = 0.0
    uses: Uses = ()
    expected: Expected | None = None


class Ours:
    """The policy's temperatures and forecasts, over the same memory."""

    def __init__(self, setup: Setup, outcome: Replayed) -> None:
        self.setup, self.outcome = setup, outcome
        self._known: dict[str, Known] = {}
        self._inside: dict[str, float] = {}  # workload, and since when it is ready
        self._prefetched: set[str] = set()
        self._day: date | None = None
        self._coming: list[tuple[float, str, Expected]] = []  # when to begin, by time
        self._tiers = {RAM: setup.memory, "slower": setup.slower}

    def ready(self, workload: str) -> float | None:
        return self._inside.get(workload)

    def until(self, now: float) -> None:
        """Begin all copies that are due by the forecasts of each day."""
        zone = self.setup.rules.zone
        today = datetime.fromtimestamp(now, zone).date()
        day = self._day or today
        while day <= today:
            if day != self._day:
                self._forecast(day, zone)
                self._day = day
            end = datetime.combine(day + timedelta(1), datetime.min.time(), zone).timestamp()
            self._begin(min(now, end))
            day += timedelta(1)

    def _forecast(self, day: date, zone: tzinfo) -> None:
        if not self.setup.prefetch:
            return
        margin = self.setup.rules.prefetch_margin
        for name, known in self._known.items():
            for expected in expected_on(known.uses, day, zone):
                lead = self.setup.slower.seconds(known.size) + margin
                heapq.heappush(self._coming, (expected.at - lead, name, expected))

    def _begin(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            at, name, expected = heapq.heappop(self._coming)
            known = self._known[name]
            if not has_been(expected, known.uses, at):
                known.expected = expected
                if name not in self._inside and self._make_room(name, at):
                    self._inside[name] = at + self.setup.slower.seconds(known.size)
                    self._prefetched.add(name)
                    self.outcome.prefetched += 1
                    self.outcome.prefetched_bytes += known.size
                    self.outcome.moved_bytes += known.size

    def used(self, access: Access) -> None:
        known = self._known.setdefault(access.workload, Known(access.size, access.time, access.time))
        half_life = self.setup.rules.half_life
        known.weight = known.weight * math.exp2((known.last - access.time) / half_life) + 1
        known.size, known.last, known.expected = access.size, access.time, None
        known.uses = remember(known.uses, access.time)
        self._prefetched.discard(access.workload)
        if access.workload not in self._inside and self._make_room(access.workload, access.time):
            self._inside[access.workload] = access.time

    def _make_room(self, name: str, now: float) -> bool:
        """Evict what is colder until an image fits; nothing, if it would not."""
        excess = sum(self._known[one].size for one in self._inside) + self._known[name].size - self.setup.capacity
        limit = COLDER * self._warmth(name, now)
        found: list[tuple[float, str]] = []
        for warmth, one in sorted((self._warmth(one, now), one) for one in self._inside) if excess > 0 else ():
            if excess <= 0 or warmth >= limit:
                break
            found.append((warmth, one))
            excess -= self._known[one].size
        leaving = []
        for warmth, one in reversed(found):
            if excess + self._known[one].size <= 0:
                excess += self._known[one].size
            else:
                leaving.append((warmth, one))
        lost = sum(warmth * self._known[one].size for warmth, one in leaving)
        if excess > 0 or lost > limit * self._known[name].size:
            return False
        for _, one in leaving:
            del self._inside[one]
            self.outcome.prefetched_in_vain += one in self._prefetched
            self._prefetched.discard(one)
        return True

    def _warmth(self, name: str, now: float) -> float:
        known, rules = self._known[name], self.setup.rules
        weight = known.weight * math.exp2((known.last - now) / rules.half_life)
        rate = rate_of(weight, observed=now - known.first, idle=now - known.last, half_life=rules.half_life)
        expected = known.expected if known.expected and now <= known.expected.at + rules.prefetch_hold else None
        saved = saved_seconds(known.size, RAM, ["slower"], self._tiers)
        return temperature(max(rate, expected_rate(expected, rules.prefetch_hold)), saved, known.size)


REPLACEMENTS: Final[Mapping[str, Callable[[Setup, Replayed], Replacement]]] = {
    "lru": lambda setup, outcome: Classic(setup, lambda memory, name: (memory.last[name], 0.0)),
    "lfu": lambda setup, outcome: Classic(setup, lambda memory, name: (memory.count[name], memory.last[name])),
    "kybernate": Ours,
}

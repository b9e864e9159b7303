"""When a workload is expected again, from the times of its uses: one that is used every weekday at 9, for example.

Only *arrivals* count: uses after a quiet half hour, because what is in use is in memory anyway. An arrival is expected
on a day when, of the last days of the same kind, enough had one near the same time on the wall clock:

- 3 of the last 5 weekdays (for a weekday), or of the last 5 days of weekends (for one of those);
- or 3 of the last 4 of the same day of the week.

And that must not be chance: if as many arrivals fell at random into one half of the day, it would be rarer than
one in a thousand. Days before the pattern began do not count. So a single use means nothing, a holiday does not
end a pattern, and one that has ceased ends after three days. Times are compared as clocks of `zone` show them: a
change to daylight saving time moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Final

QUIET: Final = 1800.0  # seconds without a use before an arrival
NEAR: Final = 1200.0  # seconds by which arrivals of a pattern differ from one of them, at most
ENOUGH: Final = 3  # days with an arrival
CHANCE: Final = 0.001  # that arrivals at any time look like a pattern, at most
LOOK_BACK: Final = 28  # days
DAY: Final = 86400.0  # seconds
Uses = tuple[float, ...]
MOST: Final = 512  # uses that are remembered
SLOT: Final = 600.0  # seconds of which one use is remembered, after a day


@dataclass(frozen=True)
class Kind:
    """A kind of days: those for which weekdays (Monday is 0) it holds, and how many of the last ones are looked at."""

    name: str
    weekdays: frozenset[int]
    last: int


@dataclass(frozen=True)
class Expected:
    """An expected use: `at` in seconds since 1970; `days` of the last `of` days of a kind had one near that time."""

    at: float
    days: int
    of: int
    kind: str
    clock: str  # the time of day, "09:00"

    @property
    def share(self) -> float:
        return self.days / self.of


@dataclass(frozen=True)
class Arrival:
    """A use after a quiet time, as the wall clock shows it: `second` since midnight."""

    day: date
    second: float


def expected_use(uses: Uses, *, now: float, zone: tzinfo, ahead: float, behind: float) -> Expected | None:
    """Return the use that is expected between `behind` seconds ago and `ahead` seconds from now, or None.

    One that has been there, up to `NEAR` seconds early, is not expected any more. Of several, the surest is returned.
    """
    first, last = (datetime.fromtimestamp(now + offset, zone).date() for offset in (-behind - NEAR, ahead + NEAR))
    found = (
        one
        for number in range((last - first).days + 1)
        for one in expected_on(uses, first + timedelta(number), zone)
        if now - behind <= one.at <= now + ahead and not has_been(one, uses, now)
    )
    return max(found, key=_sureness, default=None)


def has_been(expected: Expected, uses: Uses, now: float) -> bool:
    """Return whether there was a use at the expected time, or shortly before, or after it."""
    return any(expected.at - NEAR <= use <= now for use in uses)


@lru_cache(maxsize=4096)
def expected_on(uses: Uses, day: date, zone: tzinfo) -> tuple[Expected, ...]:
    """Return the uses that are expected on a day, by those of earlier days; of those near each other the surest.

    `uses` are seconds since 1970 in any order.
    """
    arrivals = [one for one in _arrivals(uses, zone) if day - timedelta(LOOK_BACK) <= one.day < day]
    shown = [seen for one in arrivals for seen in _across_midnight(one)]
    often = len(arrivals) / max(1, (day - min((one.day for one in arrivals), default=day)).days)
    found: list[Expected] = []
    for second in sorted({one.second for one in arrivals}):
        near = [one for one in shown if abs(one.second - second) <= NEAR]
        found += [one for kind in _kinds(day) if (one := _regular(day, near, kind, zone)) and _is_no_chance(one, often)]
    kept: list[Expected] = []
    for one in sorted(found, key=_sureness, reverse=True):
        if all(abs(one.at - other.at) > NEAR for other in kept):
            kept.append(one)
    return tuple(kept)


def remember(uses: Uses, at: float) -> Uses:
    """Return the uses with one more, thinned so that weeks fit: of those older than a day, one for each ten minutes."""
    kept: list[float] = []
    for one in sorted((*uses, at)):
        recent = one > at - DAY
        if one > at - (LOOK_BACK + 1) * DAY and (recent or not kept or one // SLOT != kept[-1] // SLOT):
            kept.append(one)
    return tuple(kept[-MOST:])


def _arrivals(uses: Uses, zone: tzinfo) -> list[Arrival]:
    ordered = sorted(uses)
    before = (float("-inf"), *ordered)
    return [_arrival(use, zone) for last, use in zip(before, ordered, strict=False) if use - last >= QUIET]


def _arrival(use: float, zone: tzinfo) -> Arrival:
    local = datetime.fromtimestamp(use, zone)
    return Arrival(local.date(), local.hour * 3600 + local.minute * 60 + local.second)


def _across_midnight(one: Arrival) -> Iterator[Arrival]:
    """Yield an arrival, and one of shortly before or after midnight as one of the other day, too."""
    yield one
    if one.second < NEAR:
        yield Arrival(one.day - timedelta(1), one.second + DAY)
    elif one.second > DAY - NEAR:
        yield Arrival(one.day + timedelta(1), one.second - DAY)


def _regular(day: date, near: list[Arrival], kind: Kind, zone: tzinfo) -> Expected | None:
    """Return the expected use if enough of the last days of the kind had an arrival; early ones set the time."""
    of_kind = {one.day for one in near if one.day.weekday() in kind.weekdays}
    if len(of_kind) < ENOUGH:
        return None
    looked_at = [one for one in _before(day, min(of_kind)) if one.weekday() in kind.weekdays][: kind.last]
    hits = of_kind.intersection(looked_at)
    if len(hits) < ENOUGH:
        return None
    seconds = sorted(one.second for one in near if one.day in hits)
    second = seconds[len(seconds) // 4]
    return Expected(_instant(day, second, zone), len(hits), len(looked_at), kind.name, _clock(second))


def _is_no_chance(one: Expected, often: float) -> bool:
    """Return whether so many days would be rare if arrivals, `often` a day, were at any time of one half of the day."""
    near = min(1.0, often * 2 * NEAR / (DAY / 2))
    tail = sum(
        math.comb(one.of, days) * near**days * (1 - near) ** (one.of - days) for days in range(one.days, one.of + 1)
    )
    return tail <= CHANCE


def _kinds(day: date) -> tuple[Kind, Kind]:
    weekday = day.weekday()
    same = Kind(f"every {day:%A}", frozenset({weekday}), 4)
    if weekday < 5:
        return Kind("every weekday", frozenset(range(5)), 5), same
    return Kind("on weekends", frozenset({5, 6}), 5), same


def _before(day: date, first: date) -> Iterator[date]:
    """Yield the days before `day`, the latest first, down to `first`."""
    for number in range(1, (day - first).days + 1):
        yield day - timedelta(number)


def _sureness(one: Expected) -> tuple[float, int, float]:
    return one.share, one.days, -one.at


def _instant(day: date, second: float, zone: tzinfo) -> float:
    """Return when the wall clock shows that time: the earlier of two, and an hour later if it never does."""
    wall = datetime.combine(day, time(), zone) + timedelta(seconds=second)
    return wall.timestamp()


def _clock(second: float) -> str:
    minutes = int(second % DAY) // 60
    return f"{minutes // 60:02}:{minutes % 60:02}"

"""Windows of the week in which one kind of work is preferred: inference by day, training by night."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES: Final = 24 * 60


@dataclass(frozen=True)
class Window:
    """From `start` to `end`, minutes of the day, on `days` (Monday is 0), `prefer` comes first.

    One whose end is not after its start ends on the next day.
    """

    days: frozenset[int]
    start: int
    end: int
    prefer: str

    def holds(self, weekday: int, minute: int) -> bool:
        """Return whether it covers a minute of a day of the week."""
        if self.start < self.end:
            return weekday in self.days and self.start <= minute < self.end
        yesterday = (weekday - 1) % len(DAYS)
        return (weekday in self.days and minute >= self.start) or (yesterday in self.days and minute < self.end)


@dataclass(frozen=True)
class Change:
    """From `at` on, seconds since 1970, `prefer` is preferred; "" is no kind."""

    at: float
    prefer: str


def preferred(windows: Sequence[Window], zone: tzinfo, now: float) -> str:
    """Return the kind that is preferred now, "" for none. The first window that covers the time wins."""
    if not windows:
        return ""
    local = datetime.fromtimestamp(now, zone)
    weekday, minute = local.weekday(), local.hour * 60 + local.minute
    return next((window.prefer for window in windows if window.holds(weekday, minute)), "")


def changes(windows: Sequence[Window], zone: tzinfo, now: float, days: int = 8) -> Iterator[Change]:
    """Yield the changes of the preferred kind after `now`, in order.

    An hour that the clock skips or has twice is taken as the zone's rules show it: a window's edge within a skipped
    hour is where the clock jumps.
    """
    if not windows:
        return
    before = preferred(windows, zone, now)
    for at in _edges(windows, zone, now, days):
        kind = preferred(windows, zone, at)
        if kind != before:
            yield Change(at, kind)
            before = kind


def _edges(windows: Sequence[Window], zone: tzinfo, now: float, days: int) -> list[float]:
    midnight = datetime.fromtimestamp(now, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    minutes = {minute % DAY_MINUTES for window in windows for minute in (window.start, window.end)}
    found: set[float] = set()
    for day in range(days + 1):
        date = (midnight + timedelta(days=day)).date()
        for minute in minutes:
            for fold in (0, 1):
                wall = datetime(date.year, date.month, date.day, minute // 60, minute % 60, tzinfo=zone, fold=fold)
                found.add(wall.timestamp())
        found.update(_jumps(midnight + timedelta(days=day)))
    return sorted(at for at in found if at > now)


def _jumps(midnight: datetime) -> Iterator[float]:
    """Yield when the clock is set forward or back on a day: there, too, another window may begin to hold."""
    start = midnight.astimezone(UTC)
    for hour in range(25):
        at = start + timedelta(hours=hour)
        after = at + timedelta(hours=1)
        if at.astimezone(midnight.tzinfo).utcoffset() != after.astimezone(midnight.tzinfo).utcoffset():
            yield from ((at + timedelta(minutes=minute)).timestamp() for minute in range(0, 61, 15))

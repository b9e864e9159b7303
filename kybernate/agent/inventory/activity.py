"""What others report of the use of containers: requests in flight, as a proxy counts them. Without I/O.

A report of one reporter on a container replaces its last one, and ends by itself. So a proxy that dies keeps no
container awake for longer than its last report lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kybernate.agent.inventory.containers import Key
from kybernate.node.failure import Exhausted

LASTS_SECONDS: Final = 10.0  # a report that does not say how long
MOST_SECONDS: Final = 3600.0
MOST_REPORTERS: Final = 256  # of one container
LONGEST_NAME: Final = 128  # of a reporter, in characters


@dataclass(frozen=True)
class InUse:
    """Requests in flight at a container, and until when it counts as in use, in seconds since 1970; 0: not reported."""

    in_flight: int = 0
    until: float = 0.0


class Reports:
    """Reports by container and reporter. `changed` gets what has changed, by container."""

    def __init__(self, changed: Callable[[Key, InUse], object], now: Callable[[], float]) -> None:
        self._changed, self._now = changed, now
        self._reports: dict[Key, dict[str, InUse]] = {}
        self._active: dict[Key, float] = {}  # when each was last seen in use

    def report(self, reporter: str, keys: Sequence[Key], in_flight: int, seconds: float) -> None:
        """Note that containers answer so many requests, for so many seconds. Raises Exhausted: too many report."""
        until = self._now() + min(seconds or LASTS_SECONDS, MOST_SECONDS)
        for key in keys:
            known = self._reports.get(key, {})
            if reporter not in known and len(known) >= MOST_REPORTERS:
                raise Exhausted(f"{len(known)} programs already report on {key[1]}", state="nothing was noted")
            self._reports.setdefault(key, {})[reporter] = InUse(in_flight, until)
            if in_flight:
                self._active[key] = self._now()
            self._changed(key, self.of(key))

    def of(self, key: Key) -> InUse:
        """Return what all reporters together say of a container now."""
        now = self._now()
        valid = [one for one in self._reports.get(key, {}).values() if one.until > now]
        busy = [one.until for one in valid if one.in_flight]
        return InUse(sum(one.in_flight for one in valid), max(busy, default=0.0))

    def mark(self, key: Key) -> int:
        """Return a number that rises between two looks where the container was in use, in microseconds."""
        if self.of(key).in_flight:
            self._active[key] = self._now()
        return int(self._active.get(key, 0.0) * 1e6)

    def expire(self, there: Iterable[Key]) -> None:
        """Forget reports that have ended, and those of containers that are not `there`."""
        now, known = self._now(), set(there)
        for key, reports in list(self._reports.items()):
            ended = [name for name, one in reports.items() if one.until <= now]
            for name in ended:
                del reports[name]
            if key not in known or not reports:
                del self._reports[key]
            if ended and key in known:
                self._changed(key, self.of(key))
        for key in self._active.keys() - known:
            del self._active[key]

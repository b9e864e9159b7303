"""When the policy tries again what has not helped: after longer and longer pauses, so that no log and no disk fills."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

FIRST_SECONDS: Final = 300.0
LONGEST_SECONDS: Final = 6 * 3600.0


@dataclass
class Attempts:
    """Attempts by what they are about. Times are those of a monotonic clock, in seconds."""

    first: float = FIRST_SECONDS
    longest: float = LONGEST_SECONDS
    _begun: dict[Hashable, tuple[float, int]] = field(default_factory=dict)  # when the last one began, and how many

    def is_due(self, subject: Hashable, now: float) -> bool:
        """Return whether a new attempt may begin."""
        at, count = self._begun.get(subject, (now, 0))
        return count == 0 or now - at >= self.pause(count)

    def begin(self, subject: Hashable, now: float) -> int:
        """Note that an attempt begins, and return how many there were before it, without those of long ago."""
        self._begun = {one: (at, count) for one, (at, count) in self._begun.items() if now - at < 2 * self.pause(count)}
        _, count = self._begun.get(subject, (now, 0))
        self._begun[subject] = now, count + 1
        return count

    def pause(self, count: int) -> float:
        """Return the seconds between the beginning of attempt number `count` and the next one."""
        return float(min(self.longest, self.first * 2.0 ** min(count - 1, 32)))

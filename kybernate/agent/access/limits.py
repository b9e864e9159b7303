"""How often, and how many at a time: connections of a caller, calls of a container. Without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kybernate.node.failure import Refused


@dataclass
class Places:
    """Counts what is in use by key."""

    _taken: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def one(self, key: str, limit: int) -> Iterator[None]:
        """Take a place while the block runs. Raises Refused."""
        if self._taken[key] >= limit:
            raise Refused(f"{key} has {limit} connections already")
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


@dataclass
class Buckets:
    """A token bucket for each key: `limit` calls in `seconds`, evenly refilled; a bucket that is full is forgotten."""

    clock: Callable[[], float]
    seconds: float = 60.0
    _level: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, key: str, limit: int) -> bool:
        """Return whether one more call fits."""
        now = self.clock()
        if len(self._level) > 1024:
            self._forget(now)
        tokens, then = self._level.get(key, (float(limit), now))
        tokens = min(float(limit), tokens + (now - then) * limit / self.seconds)
        fits = tokens >= 1
        self._level[key] = (tokens - 1 if fits else tokens, now)
        return fits

    def _forget(self, now: float) -> None:
        self._level = {key: value for key, value in self._level.items() if now - value[1] < self.seconds}

"""How often, and how many at a time: connections of a caller, calls of a container. Without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kybernate.node.failure import Exhausted, Refused


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
class Weights:
    """Counts calls, and bytes of answers that are not sent yet, by key, and the bytes of all together.

    One answer of a key that has no other always passes: no answer is larger than gRPC's own limit.
    """

    calls: int
    bytes: int
    all_bytes: int
    _calls: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)

    def begin(self, key: str) -> None:
        """Count a call. Raises Exhausted."""
        if self._calls[key] >= self.calls:
            raise _exhausted(f"{key} has {self.calls} calls at the same time already")
        self._calls[key] += 1

    def end(self, key: str, size: int) -> None:
        """Forget a call, and the `size` that it has added."""
        self._calls[key] -= 1
        self.add(key, -size)
        if not self._calls[key]:
            del self._calls[key]

    def add(self, key: str, size: int) -> None:
        """Count bytes of an answer; less than 0 takes them off. Raises Exhausted."""
        held = self._bytes[key]
        if size > 0 and held and (held + size > self.bytes or self._bytes.total() + size > self.all_bytes):
            raise _exhausted(f"answers of {held >> 20} MiB wait for {key} to read them")
        self._bytes[key] += size
        if not self._bytes[key]:
            del self._bytes[key]


def _exhausted(text: str) -> Exhausted:
    advice = "read the answers, and make fewer calls at the same time"
    return Exhausted(text, state="nothing was changed", advice=advice)


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

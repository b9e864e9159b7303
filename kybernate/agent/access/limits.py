"""How often, and how many at a time: connections of a caller, calls of a container. Without I/O, but a loop's clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field


class LimitReached(Exception):
    """A caller has as many connections as it may, or its connection has said too little for too long."""


@dataclass
class Places:
    """Counts what is in use by key."""

    _taken: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def one(self, key: str, limit: int) -> Iterator[None]:
        """Take a place while the block runs. Raises LimitReached."""
        if self._taken[key] >= limit:
            raise LimitReached(f"{key} has {limit} connections already")
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


@dataclass
class Pending:
    """Connections that have not shown yet who they are, or what they want, in the order in which they came.

    Others may share an address with a client that opens connections without end. So one that is too much is not
    refused: it takes the place of the oldest, which had the most time.
    """

    most: int = 256  # of all keys
    _since: dict[asyncio.Timeout, str] = field(default_factory=dict)

    @asynccontextmanager
    async def one(self, key: str, limit: int, seconds: float) -> AsyncIterator[None]:
        """Let the block run for `seconds`, or until its place is taken by a newer one. Raises LimitReached."""
        same = [timeout for timeout, other in self._since.items() if other == key]
        for oldest in same[: max(0, len(same) + 1 - limit)] or list(self._since)[: len(self._since) + 1 - self.most]:
            self._end(oldest)
        mine = asyncio.timeout(seconds)
        try:
            async with mine:
                self._since[mine] = key
                yield
        except TimeoutError:
            why = f"had not ended within {seconds:g} s" if mine in self._since else "gave way to newer ones"
            raise LimitReached(f"one of the {key} {why}") from None
        finally:
            self._since.pop(mine, None)

    def end_all(self) -> None:
        """End all blocks."""
        for one in list(self._since):
            self._end(one)

    def _end(self, one: asyncio.Timeout) -> None:
        del self._since[one]
        if not one.expired():
            one.reschedule(asyncio.get_running_loop().time())


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

"""How fast a connection is, measured by what is sent over it, and which level of compression suits that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

MIB: Final = 1 << 20
USUAL: Final = 3  # of zstd, while nothing is known
# Level: bytes per second of one thread, and what is left of them. Measured with programs and libraries in chunks of
# 2 MiB; memory differs, in about the same proportions. Higher levels cost several times the CPU for a few per cent.
LEVELS: Final = {1: (234 * MIB, 0.385), 3: (171 * MIB, 0.344), 6: (50 * MIB, 0.323)}


def level_for(bytes_per_second: float, threads: int) -> int:
    """Return the level with which an image is sent soonest, by `threads` that compress. 0 is an unknown speed.

    Compressing overlaps with sending, so the slower of the two counts. Never none: room in the store costs, too.
    """
    if not bytes_per_second:
        return USUAL

    def image_bytes_per_second(level: int) -> float:
        speed, left = LEVELS[level]
        return min(speed * threads, bytes_per_second / left)

    return max(LEVELS, key=image_bytes_per_second)


class Link:
    """Counts what is sent, also by requests in parallel. It belongs to one event loop; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes = self._sending = 0
        self._seconds = self._since = 0.0  # for which at least one request was on its way

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count bytes that are sent in the block."""
        if not self._sending:
            self._since = self._clock()
        self._sending += 1
        try:
            yield
            self._bytes += size
        finally:
            self._sending -= 1
            if not self._sending:
                self._seconds += self._clock() - self._since

    @property
    def bytes_per_second(self) -> float:
        """Return the speed so far, 0 before the first request has ended."""
        seconds = self._seconds + (self._clock() - self._since if self._sending else 0.0)
        return self._bytes / seconds if seconds > 0 else 0.0

"""How bytes move: how many requests at a time, how fast at most, and what is reported on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class TransferProgress:
    """What a transfer has done. Bytes of the image; `sent_bytes` are those that went over the wire."""

    total_bytes: int = 0
    done_bytes: int = 0
    sent_bytes: int = 0
    known_bytes: int = 0  # that were there already
    zero_bytes: int = 0
    chunks: int = 0


@dataclass
class Transfer:
    """The limits of a transfer. `bytes_per_second` is 0 for none; it may be changed while the transfer runs.

    Reader and writer have no more than `parallel` requests, with the memory that each needs, on their way.
    """

    parallel: int = 4
    level: int | None = 3  # of zstd; 0 never compresses, None goes by the speed of the connection
    bytes_per_second: float = 0.0
    report: Callable[[TransferProgress], object] = lambda progress: None
    progress: TransferProgress = field(default_factory=TransferProgress)
    _free_at: float = 0.0

    def begins(self, total_bytes: int) -> None:
        """Count an image from its beginning; of what another source has given, each piece is then known."""
        progress = self.progress
        progress.total_bytes = total_bytes
        progress.done_bytes = progress.known_bytes = progress.zero_bytes = progress.chunks = 0

    async def pace(self, count: int) -> None:
        """Wait until a request for `count` bytes is within the limit of bytes per second."""
        if not self.bytes_per_second:
            return
        now = time.monotonic()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self.bytes_per_second
        await asyncio.sleep(begin - now)

    def done(
        self, *, done_bytes: int = 0, sent_bytes: int = 0, known_bytes: int = 0, zero_bytes: int = 0, chunks: int = 0
    ) -> None:
        """Add to the progress, and report it."""
        progress = self.progress
        progress.done_bytes += done_bytes
        progress.sent_bytes += sent_bytes
        progress.known_bytes += known_bytes
        progress.zero_bytes += zero_bytes
        progress.chunks += chunks
        self.report(progress)

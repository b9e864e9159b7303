"""Bytes that move from one descriptor to another: decides what to do next, and does not wait.

A transfer holds at most one block. It reads the next one only when the last has been taken, so a slow reader at the far
end slows the writer at the near end, and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable

BLOCK_BYTES = 64 * 1024  # what a pipe holds
BLOCKS_PER_TURN = 16  # then other streams and calls get their turn

READING = "reading"  # nothing to do until the source is readable
WRITING = "writing"  # nothing to do until the sink is writable
ENDED = "ended"


class StreamTransfer:
    """Moves one stream by two calls that its owner passes in.

    `read(size)` returns b"" at the end and None when it would block. `write(data)` returns how many bytes it took, None
    when it would block, and raises OSError when the sink refuses them. With `keep_draining` refused bytes are dropped
    and counted in `lost`, so that a full disk does not stop the writer at the source; otherwise a refusal ends it.
    """

    def __init__(
        self,
        read: Callable[[int], bytes | None],
        write: Callable[[memoryview], int | None],
        *,
        keep_draining: bool,
    ) -> None:
        self._read = read
        self._write = write
        self._keep_draining = keep_draining
        self._rest = memoryview(b"")
        self._over = False
        self.lost = 0
        self.refusal: OSError | None = None  # why the last block was dropped; None once the sink takes bytes again

    @property
    def held(self) -> int:
        """How many bytes were read and not yet written."""
        return len(self._rest)

    def advance(self) -> str:
        """Move what can be moved now and return the state: READING, WRITING or ENDED.

        READING may also mean that the turn is over: the source is then still readable.
        """
        if self._over:
            return ENDED
        for _ in range(BLOCKS_PER_TURN):
            if not self._rest and (state := self._fetch()):
                break
            if state := self._flush():
                break
        self._over = state == ENDED
        return state or READING

    def _fetch(self) -> str:
        block = self._read(BLOCK_BYTES)
        if block is None:
            return READING
        self._rest = memoryview(block)
        return "" if block else ENDED

    def _flush(self) -> str:
        while self._rest:
            try:
                taken = self._write(self._rest)
            except OSError as error:
                return self._refused(error)
            if not taken:
                return WRITING
            self._rest = self._rest[taken:]
            self.refusal = None
        return ""

    def _refused(self, error: OSError) -> str:
        self.lost += len(self._rest)
        self.refusal = error
        self._rest = memoryview(b"")
        return "" if self._keep_draining else ENDED

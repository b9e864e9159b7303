"""Copies one stream on the event loop: no thread, no task, and no buffer while the stream flows."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

from kybernate_shim.logs import Log
from kybernate_shim.task.ends import End, readable_bytes
from kybernate_shim.task.transfer import ENDED, READING, WRITING, StreamTransfer


class Pump:
    """Copies from `source` to `sink` until the source ends, then closes both immediately: clients wait for that end.

    Both descriptors must be non-blocking, and no other pump may use them: the event loop knows one reader and one
    writer per descriptor. `keep_draining`: see Transfer; a loss is logged when it starts and when it is over.
    """

    def __init__(
        self,
        source: End,
        sink: End,
        *,
        log: Log,
        keep_draining: bool,
    ) -> None:
        self.source = source
        self.sink = sink
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] | None = None
        self._log = log
        self._keep_draining = keep_draining
        self._transfer = StreamTransfer(self._read, self._write, keep_draining=keep_draining)
        self._started = False
        self._waits_for = ""
        self._reported = 0  # lost bytes that the log knows of
        self._refused = False
        self._wrote_at = 0.0

    def start(self) -> None:
        """Copy from now on."""
        self._started = True
        self._wait_for(READING)

    def stop(self) -> None:
        """Stop copying and close both ends. Idempotent; bytes that the sink has not taken by now are lost.

        Without a start, the bytes are not output of the process, which has not begun: see `Stdio.unheard`.
        """
        if not self.ended.is_set():
            self._finish(lost=self._transfer.held + self._unread() if self._keep_draining and self._started else 0)

    def reader_is_behind(self, seconds: float) -> bool:
        """Return whether a client is about to read what is in its FIFO: it is open there, with the latest bytes unread.

        A client that has not read bytes within `seconds` is regarded as one that does not read.
        """
        coming = not self.ended.is_set() and self._waits_for == READING and self._unread() > 0
        recent = asyncio.get_running_loop().time() < self._wrote_at + seconds
        return (coming or (recent and self.sink.unread() > 0)) and self.sink.has_client()

    def _turn(self) -> None:
        state = self._transfer.advance()
        self._report_refusal()
        if state == ENDED:
            self._finish()
        else:
            self._wait_for(state)

    def _finish(self, *, lost: int = 0) -> None:
        self._wait_for("")
        self._report_lost(lost)
        self.source.close()
        self.sink.finish()
        self.ended.set()
        if self.on_end:
            self.on_end()

    def _wait_for(self, state: str) -> None:
        if state == self._waits_for:
            return
        loop = asyncio.get_running_loop()
        if self._waits_for == READING:
            loop.remove_reader(self.source.fd)
        elif self._waits_for == WRITING:
            loop.remove_writer(self.sink.fd)
        if state == READING:
            loop.add_reader(self.source.fd, self._turn)
        elif state == WRITING:
            loop.add_writer(self.sink.fd, self._turn)
        self._waits_for = state

    def _report_refusal(self) -> None:
        """Log that the sink has begun to refuse bytes, or how many it did not get when it takes them again."""
        refusal = self._transfer.refusal
        if refusal and self._keep_draining and not self._refused:
            self._log.error("output.refused", error=str(refusal))
        elif not refusal and self._refused:
            self._report_lost()
        self._refused = refusal is not None

    def _report_lost(self, more: int = 0) -> None:
        lost = self._transfer.lost - self._reported + more
        self._reported = self._transfer.lost
        if lost and self._keep_draining:
            self._log.error("output.lost", bytes=lost)

    def _unread(self) -> int:
        return readable_bytes(self.source.fd)

    def _read(self, size: int) -> bytes | None:
        try:
            return os.read(self.source.fd, size)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:  # a terminal that no process has open any more
                return b""
            raise

    def _write(self, data: memoryview) -> int | None:
        try:
            written = os.write(self.sink.fd, data)
        except BlockingIOError:
            return None
        self._wrote_at = asyncio.get_running_loop().time()
        return written

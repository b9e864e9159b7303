"""Threads that work through pieces, each with its own buffer: progress, cancellation, the first error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kybernate_shim.vram_io.buffers import BLOCK_BYTES, Buffer
from kybernate_shim.vram_io.digest import KIND
from kybernate_shim.vram_io.errors import VramError

if TYPE_CHECKING:
    from kybernate_shim.vram_io.arrival import Arrival

T = TypeVar("T")
MOST_THREADS = 16  # by default, given enough cores: into a process's memory, 8 made 20-23 GB/s and 16 made 31 (H200)


def _default_threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class CopyOptions:
    """How to move bytes.

    Memory needed: `piece_bytes` a thread. `direct` asks for direct I/O (None: where the files lie on a block device and
    are not in memory anyway). `on_progress` gets the bytes done so far, holes included, from different threads but one
    call at a time, and never decreasing; it must be quick. Setting `cancel` ends the transfer within a piece. New files
    in memory come from `pool`, as far as it has any. `digest` is the kind of digest of new files.
    With an `arrival`, a read waits for what it needs; with a `key`, files are encrypted (see `sealed`).
    """

    threads: int = field(default_factory=_default_threads)
    piece_bytes: int = 2 << 20  # fits into a core's own cache: 0.65 s of CPU time for a GiB, 0.85 with 16 MiB
    direct: bool | None = None
    on_progress: Callable[[int], None] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    pool: Path | None = None
    digest: str = KIND
    arrival: Arrival | None = None
    key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.threads < 1 or self.piece_bytes < BLOCK_BYTES or self.piece_bytes % BLOCK_BYTES:
            raise ValueError(f"{self.threads} threads, pieces of {self.piece_bytes} bytes: not possible")


class Piece(NamedTuple, Generic[T]):
    """`size` bytes at `offset` of `whole`."""

    whole: T
    offset: int
    size: int


def pieces(wholes: Iterable[tuple[T, int, int]]) -> Iterator[Piece[T]]:
    """Cut each whole, given with its size and the size of its pieces, and yield the pieces in order."""
    for whole, size, piece_bytes in wholes:
        for offset in range(0, size, piece_bytes):
            yield Piece(whole, offset, min(piece_bytes, size - offset))


def run(todo: Iterator[Piece[T]], work: Callable[[Piece[T], Buffer], int], how: CopyOptions) -> None:
    """Have `work` done for every piece, in parallel and starting in order; it returns the bytes to report as done.

    Raises the first error of a piece, VramError if `how.cancel` was set, after all threads have ended.
    """
    workers = _ThreadPool(todo, work, how)
    threads = [threading.Thread(target=workers.work_off, name=f"vram-{number}") for number in range(how.threads)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException as error:  # KeyboardInterrupt while joining, or no thread to be had
        workers.fail(error)
        for thread in started:
            thread.join()
        raise
    if workers.failure is not None:
        raise workers.failure


class _ThreadPool(Generic[T]):
    """What the threads share; `_lock` guards the iterator, the count and the first failure."""

    def __init__(self, todo: Iterator[Piece[T]], work: Callable[[Piece[T], Buffer], int], how: CopyOptions) -> None:
        self.failure: BaseException | None = None
        self._todo = todo
        self._work = work
        self._how = how
        self._done = 0
        self._lock = threading.Lock()

    def work_off(self) -> None:
        """Work until nothing is left or a thread has failed. Runs in each thread."""
        buffer: Buffer | None = None
        try:
            while (piece := self._next()) is not None:
                if buffer is None or len(buffer.view) < piece.size:
                    buffer = Buffer(max(piece.size, self._how.piece_bytes))
                self._report(self._work(piece, buffer))
        except BaseException as error:  # noqa: BLE001  # raised again by run(), in the caller's thread
            self.fail(error)
        finally:
            if buffer is not None:
                buffer.close()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error

    def _next(self) -> Piece[T] | None:
        with self._lock:
            if self.failure is not None:
                return None
            piece = next(self._todo, None)
            if piece is not None and self._how.cancel.is_set():
                raise VramError(f"cancelled after {self._done} bytes")
            return piece

    def _report(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._how.on_progress is not None and self.failure is None:
                self._how.on_progress(self._done)

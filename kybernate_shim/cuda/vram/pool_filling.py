"""Filling a pool of memory for images, by somebody who has the time.

`python -m kybernate_shim.cuda.vram.pool_filling DIRECTORY SIZE…` is the CUDA helper's way to do that.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.cuda.headroom import available_bytes
from kybernate_shim.cuda.vram import files, pool
from kybernate_shim.cuda.vram.errors import FileFailed, VramError
from kybernate_shim.linux.private import make_directory

UNFINISHED = ".unfinished"
KEPT_FREE = 1 / 16  # of the machine's memory: a pool must not be what the kernel ends programs for
THREADS = 2  # of a filling that nobody waits for
NICE = 19


class PoolUnavailable(VramError):
    """The pool cannot be filled, or only in part; the message says why. Checkpoints make their memory then."""


def fill(
    directory: Path,
    sizes: Sequence[int],
    *,
    threads: int = THREADS,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Have one file of each of these sizes in the pool, and no others. `on_progress` gets the bytes that were made.

    Raises PoolUnavailable. Returns at once where somebody else is filling it.
    """
    try:
        make_directory(directory)
        in_memory = files.lies_in_memory(directory)
    except OSError as error:
        raise PoolUnavailable(f"{directory} cannot be used: {error.strerror}") from error
    if not pool.is_private(directory):
        raise PoolUnavailable(f"{directory} is open to others: chmod 700, chown root")
    if not in_memory:
        raise PoolUnavailable(
            f"{directory} is not on a tmpfs: mount one for the images, and put `gpu.image_pool` there"
        )
    with _alone(directory) as alone:
        if not alone:
            return
        for left in directory.glob(f"*{UNFINISHED}"):  # by a filling that was killed
            left.unlink(missing_ok=True)
        pool.drop(directory, Counter(pool.ready(directory)) - Counter(sizes))
        done = 0
        for size in pool.lacking(directory, sizes):
            _require_memory(size)
            _make(directory, size, threads)
            on_progress(done := done + size)


def _make(directory: Path, size: int, threads: int) -> None:
    name = f"{size}-{secrets.token_hex(4)}"
    try:
        file = files.RoomyFile(directory / f"{name}{UNFINISHED}")
        try:
            file.make_room(size, threads, os.sched_getaffinity(0))
            file.path.rename(directory / f"{name}{pool.READY}")
        except BaseException:
            file.remove()
            raise
        file.close()
    except (FileFailed, OSError) as error:
        raise PoolUnavailable(f"no further {size >> 20} MiB for the pool: {error}") from error


def _require_memory(size: int) -> None:
    available = available_bytes()
    kept = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * KEPT_FREE)
    if available - size < kept:
        raise PoolUnavailable(
            f"no further {size >> 20} MiB for the pool: of the machine's memory, {available >> 20} MiB are available,"
            f" and {kept >> 20} stay free"
        )


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def main(argv: Sequence[str]) -> int:
    """Fill a pool, and return 1 with a word on stderr where that was not possible."""
    directory, *sizes = argv
    os.nice(NICE)
    try:
        fill(Path(directory), [int(size) for size in sizes])
    except PoolUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Filling a pool of memory for images, in the background.

`python -m kybernate_shim.vram_io.image_pool_filling DIRECTORY SIZE…` is the CUDA helper's way to do that.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.vram_io import files, image_pool
from kybernate_shim.vram_io.errors import FileFailed, VramError

UNFINISHED = ".unfinished"
KEPT_FREE = 1 / 16  # of the machine's memory: a pool must not make the kernel kill programs for memory
THREADS = 2  # for a filling, which no job waits for
NICE = 19


def fill(
    directory: Path,
    sizes: Sequence[int],
    *,
    threads: int = THREADS,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Have one file of each of these sizes in the pool, and no others. `on_progress` gets the bytes that were made.

    Raises VramError. Returns immediately where another process is filling it.
    """
    try:
        make_directory(directory)
        in_memory = files.lies_in_memory(directory)
    except OSError as error:
        raise VramError(f"{directory} cannot be used: {error.strerror}") from error
    if not image_pool.is_private(directory):
        raise VramError(f"{directory} is open to others: chmod 700, chown root")
    if not in_memory:
        raise VramError(f"{directory} is not on a tmpfs: mount one for the images, and put `gpu.image_pool` there")
    with held(try_lock_directory(directory)) as alone:
        if not alone:
            return
        for left in directory.glob(f"*{UNFINISHED}"):  # by a filling that was killed
            left.unlink(missing_ok=True)
        image_pool.drop(directory, Counter(image_pool.ready(directory)) - Counter(sizes))
        done = 0
        for size in image_pool.lacking(directory, sizes):
            _require_memory(size)
            _make(directory, size, threads)
            on_progress(done := done + size)


def _make(directory: Path, size: int, threads: int) -> None:
    name = f"{size}-{secrets.token_hex(4)}"
    try:
        file = files.RoomyFile(directory / f"{name}{UNFINISHED}")
        try:
            file.make_room(size, threads, os.sched_getaffinity(0))
            file.path.rename(directory / f"{name}{image_pool.READY}")
        except BaseException:
            file.remove()
            raise
        file.close()
    except (FileFailed, OSError) as error:
        raise VramError(f"the pool gets no more memory, {size >> 20} MiB are missing: {error}") from error


def _require_memory(size: int) -> None:
    memory = psutil.virtual_memory()
    kept = int(memory.total * KEPT_FREE)
    if memory.available - size < kept:
        raise VramError(
            f"the pool gets no more memory, {size >> 20} MiB are missing: {memory.available >> 20} MiB of the machine's"
            f" memory are available, of which {kept >> 20} stay free"
        )


def main(argv: Sequence[str]) -> int:
    """Fill a pool, and return 1, with a message on stderr, where that was not possible."""
    directory, *sizes = argv
    os.nice(NICE)
    try:
        fill(Path(directory), [int(size) for size in sizes])
    except VramError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

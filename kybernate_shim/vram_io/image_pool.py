"""Memory prepared for images: files on their tmpfs with all of their pages, so that no checkpoint has to make them.

An image takes such a file as its own, whether it needs more or less; what it leaves as zeros becomes holes. No file is
ever returned to the pool, since a container's process may have held it: `image_pool_filling` makes new ones instead.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

READY = ".ready"


def take(pool: Path | None, path: Path, wanted: int) -> bool:
    """Use a file of the pool as the new file `path`, if that saves work for one of `wanted` bytes; return whether.

    It may be smaller or larger. Where the filesystem has no room for a new file, files of the pool are removed.
    """
    if pool is None or not wanted or path.exists() or not _serves(pool, path.parent):
        return False
    had = 0
    for size, file in sorted(_ready(pool), key=lambda one: abs(one[0] - wanted)):
        if abs(size - wanted) >= wanted:
            break
        try:
            file.rename(path)
        except FileNotFoundError:  # another process has taken it
            continue
        had = size
        break
    _make_way(pool, path.parent, wanted - had)
    return had > 0


def lacking(pool: Path, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of which the pool should have a file and has none, the smallest first."""
    return sorted((Counter(sizes) - Counter(size for size, _ in _ready(pool))).elements())


def ready(pool: Path) -> list[int]:
    """Return the sizes of the files that are ready, the smallest first."""
    return sorted(size for size, _ in _ready(pool))


def drop(pool: Path, surplus: Counter[int]) -> int:
    """Remove so many files of each size, and free their memory; return how many bytes that were."""
    given = 0
    for size, file in _ready(pool):
        if surplus[size] > 0:
            surplus[size] -= 1
            given += _removed(size, file)
    return given


def is_private(pool: Path) -> bool:
    """Return whether no other user can have put files there, or have one of them open."""
    status = pool.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _serves(pool: Path, directory: Path) -> bool:
    try:
        return pool.stat().st_dev == directory.stat().st_dev and is_private(pool)
    except OSError:  # there is no pool yet
        return False


def _make_way(pool: Path, directory: Path, wanted: int) -> None:
    """Remove files of the pool, the largest first, until there is room for `wanted` bytes, or none is left."""
    for size, file in sorted(_ready(pool), reverse=True):
        space = os.statvfs(directory)
        if not space.f_blocks or space.f_bavail * space.f_frsize >= wanted:
            return
        _removed(size, file)


def _removed(size: int, file: Path) -> int:
    try:
        file.unlink()
    except FileNotFoundError:  # an image has taken it
        return 0
    return size


def _ready(pool: Path) -> Iterator[tuple[int, Path]]:
    for file in sorted(pool.glob(f"*{READY}")):
        with suppress(FileNotFoundError):
            yield file.stat().st_size, file

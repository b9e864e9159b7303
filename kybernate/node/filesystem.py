"""The filesystem that a path is on, or will be on when its missing parents have been created."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


class Space(NamedTuple):
    """Bytes of a filesystem: all, and those that are free for any user."""

    total: int
    free: int


def nearest_existing(path: Path) -> Path:
    """Return the path, or its first parent that exists. The path is absolute."""
    return next(place for place in (path, *path.parents) if place.exists())


def space_of(path: Path) -> Space:
    """Return the space of the filesystem that `path` is on or will be on. Raises OSError."""
    usage = shutil.disk_usage(nearest_existing(path))
    return Space(usage.total, usage.free)

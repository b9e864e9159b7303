"""Files that are read from the disk again."""

from __future__ import annotations

import os
from pathlib import Path


def evict(directory: Path) -> None:
    """Write back what is dirty of the files in a directory, and drop it from the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""What a process that was killed has left of images that arrived at their places: no process reads it to its end."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from kybernate.node.failure import Refused
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.vram_io.image_files import ARRIVAL

DEPTH = 2  # of an image below the root: NAME, or NAMESPACE/NAME


def remove_left(directory: Path) -> bool:
    """Remove a directory in which an image has begun to arrive that will not end to; return whether it was one.

    Blocks. Raises Refused where another process still brings it.
    """
    if (directory / NAME).exists():
        return False
    try:
        record = os.open(directory / ARRIVAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(
            f"another process is bringing the image {directory}",
            state="nothing was started",
            advice="wait until it has finished; `kybernate images --all` shows the image as unfinished until then",
        ) from None
    finally:
        os.close(record)
    shutil.rmtree(directory)
    return True


def remove_all_left(root: Path) -> list[Path]:
    """Remove all such directories below a root, and return them. Blocks. Raises OSError."""
    found = [
        record.parent for depth in range(1, DEPTH + 1) for record in root.glob("/".join(["*"] * depth + [ARRIVAL]))
    ]
    removed = []
    for directory in found:
        try:
            removed += [directory] if remove_left(directory) else []
        except Refused:
            continue
    return removed

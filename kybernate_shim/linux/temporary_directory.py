"""Directories for temporary use. tempfile does the same, but its imports would stay in the memory of every daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.undo import Undo


def new_directory(prefix: str, parent: Path | None = None) -> Path:
    """Make a directory that is ours alone, in `parent` or where temporary files are, and return its path."""
    place = parent or Path(os.environ.get("TMPDIR", "/tmp"))
    directory = place / f"{prefix}{os.urandom(4).hex()}"
    directory.mkdir(mode=0o700)
    return directory


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield such a directory, and remove it with all that is in it."""
    import shutil  # here, because the first container of a node waits for every import

    directory = new_directory(prefix, parent)
    with Undo() as undo:
        undo.callback(shutil.rmtree, directory)
        yield directory

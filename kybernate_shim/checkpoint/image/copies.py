"""Images lie below `checkpoint_root`; the node's agent keeps copies of some in memory, below `memory_root`.

Both have the same layout. A copy counts only for the image of its name: where that was replaced, it is of no use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME
from kybernate_shim.config import Config
from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.linux.plain_files import read_plain

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image.store import Image


def root_of(name: str, config: Config) -> Path:
    """Return the root below which the image `name`, NAMESPACE/NAME or NAME, is read: the copy in memory comes first."""
    memory, root = config.memory_root, config.checkpoint_root
    if memory is None or name.startswith("/") or not os.path.lexists(memory / name / NAME):
        return root
    if not os.path.lexists(root / name / NAME):
        return memory  # the only one on this node
    try:
        return memory if _manifest(memory / name) == _manifest(root / name) else root
    except OSError:
        return root


def still_there(image: Image, config: Config) -> Image:
    """Return the image, on the disk where its copy in memory was removed since it was found."""
    memory = config.memory_root
    if memory is None or not image.path.is_relative_to(memory) or os.path.lexists(image.path / NAME):
        return image
    return replace(image, path=config.checkpoint_root / image.path.relative_to(memory))


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep an image from being removed while the block reads it: a removal locks it alone, or is refused."""
    try:
        lock = try_lock_directory(directory, shared=True)
    except OSError:  # the reader says what is wrong with it
        lock = None
    with held(lock):
        yield


def _manifest(directory: Path) -> bytes:
    return read_plain(directory / NAME, most=MOST_BYTES)

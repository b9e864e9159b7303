"""The memory that an image arrives in for one restore: a tmpfs that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.checkpoint.image.plaintext_memory import private_memory, remove_stale
from kybernate_shim.run_directory import ARRIVING

NAME = "image"  # begins the name of the memory


@contextmanager
def memory_for(restore: str = "") -> Iterator[Path]:
    """Yield an empty directory in memory, which shims see, and remove it with all that is in it. Blocks.

    `restore` names it where one process has several. Raises OSError.
    """
    with private_memory(
        ARRIVING, f"{NAME}-{restore}" if restore else NAME, may_be_swapped=True, for_shims=True
    ) as memory:
        yield memory


def remove_left() -> None:
    """Remove what killed processes have left, but for what a restore still reads. Blocks."""
    remove_stale(ARRIVING)

"""The directories with what is parked of processes: each is the work of one daemon, and goes with these processes.

A daemon has the lock of a directory that it fills; afterwards, records in the arena name it as long as it is needed.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from kybernate_shim.arena.memory import Memory
from kybernate_shim.linux.locks import held, lock_directory, try_lock_directory


def new_directory(root: Path, memory: Memory, prefix: str) -> tuple[Path, int]:
    """Make a directory below `root`, and return it with its lock; remove those of ended containers. Raises OSError."""
    with held(lock_directory(root)):
        _clear(root, memory)
        directory = Path(mkdtemp(prefix=prefix, dir=root))
        return directory, lock_directory(directory)


def clear(root: Path, memory: Memory) -> None:
    """Remove the directories of ended containers below `root`. Blocks; raises OSError."""
    if root.is_dir():
        with held(lock_directory(root)):
            _clear(root, memory)


def _clear(root: Path, memory: Memory) -> None:
    for directory in root.iterdir():
        with suppress(OSError), held(try_lock_directory(directory)) as free:
            if free and str(directory) not in memory.parked():
                shutil.rmtree(directory, ignore_errors=True)

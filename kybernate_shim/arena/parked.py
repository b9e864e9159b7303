"""The directories with what is parked of processes: each is the work of one daemon, and goes with these processes.

A daemon has the lock of a directory that it fills; afterwards, records in the arena name it as long as it is needed.
Nothing but such directories is removed, by their names: others may lie next to them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from kybernate_shim.arena.memory import Memory
from kybernate_shim.linux.locks import held, lock_directory, try_lock_directory

SUFFIX = ".parked"


@contextmanager
def new_directory(root: Path, memory: Memory, prefix: str) -> Iterator[Path]:
    """Make a directory below `root`, which stays at the end if something is parked there. Blocks; raises OSError.

    Those of ended containers are removed first.
    """
    clear(root, memory)
    directory, lock = _locked(root, prefix)
    with held(lock):
        try:
            yield directory
        finally:
            with suppress(OSError):  # the next `clear` tries again
                remove(directory, memory)


def _locked(root: Path, prefix: str) -> tuple[Path, int]:
    while True:
        directory = Path(mkdtemp(prefix=prefix, suffix=SUFFIX, dir=root))
        with suppress(FileNotFoundError):  # another daemon's `clear` was faster
            lock = lock_directory(directory)
            if directory.exists():
                return directory, lock
            os.close(lock)


def clear(root: Path, memory: Memory) -> None:
    """Remove the directories of ended containers below `root`. Blocks; raises OSError."""
    for directory in root.glob(f"*{SUFFIX}"):
        with suppress(OSError), held(try_lock_directory(directory)) as free:
            if free:
                remove(directory, memory)


def remove(directory: Path, memory: Memory) -> None:
    """Remove a directory unless a process that lives has bytes there. Blocks; raises OSError.

    It is known by its name alone, which is like no other's: `root` may have another name by now.
    """
    if directory.name not in {Path(one).name for one in memory.parked()}:
        shutil.rmtree(directory, ignore_errors=True)

"""The lab's cache outside the checkout: finished layers that many runs share, and one throw-away directory a run.

Every guarantee rests on flock, whose locks die with their holder: a layer appears by rename, so a killed build is never
taken for a whole one; a layer is not removed while a run holds it; a directory whose lock is free has no run any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.failure import LabFailed


def directory() -> Path:
    """Return the cache's directory, made if need be."""
    path = Path(os.environ.get("KYBERNATE_LAB_CACHE", "/var/cache/kybernate-lab")).resolve()
    if set(str(path)) & set(":,\\"):
        raise LabFailed(f"the cache's path {path} must not hold any of : , \\ because mount options separate by them")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold the exclusive lock of file `path`; say `waiting` on stderr first when another one holds it."""
    with path.open("w") as file:
        if not _try(file.fileno(), fcntl.LOCK_EX):
            if waiting:
                print(waiting, file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def discard_unfinished(parent: Path, pattern: str = "*") -> None:
    """Remove the hidden directories in which killed processes were building or removing layers. Locking as below."""
    for path in parent.glob(f".{pattern}"):
        shutil.rmtree(path)


def hold_layer(path: Path, build: Callable[[Path], None]) -> int:
    """Make sure that the layer `path` exists and return a descriptor that keeps it from being removed.

    `build` fills an empty directory. The caller holds the lock that guards all other layers.
    """
    if not path.exists():
        unfinished = path.with_name(f".{path.name}")
        unfinished.mkdir()
        build(unfinished)
        unfinished.rename(path)
    os.utime(path)
    holder = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(holder, fcntl.LOCK_SH)
    return holder


def prune_layers(parent: Path, pattern: str, *, keep: int) -> None:
    """Remove all layers that match but the `keep` last used and those in use. Locking as for `hold_layer`."""
    layers = sorted(parent.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [path for path in layers if path.is_dir()][keep:]:
        with _lock_of(path).open("w") as file:
            if _try(file.fileno(), fcntl.LOCK_EX):
                doomed = path.with_name(f".{path.name}")
                path.rename(doomed)
                shutil.rmtree(doomed)
                _lock_of(path).unlink()


def new_run(runs: Path, name: str, clean: Callable[[Path], None]) -> tuple[Path, int]:
    """Make the directory of a new run and return it with the descriptor of its lock.

    Whatever earlier runs left that did not end by themselves is given to `clean` and then removed.
    """
    runs.mkdir(exist_ok=True)
    with locked(runs / ".lock"):
        for old in [path for path in runs.iterdir() if path.is_dir()]:
            with (old / "lock").open("w") as file:
                if _try(file.fileno(), fcntl.LOCK_EX):
                    clean(old)
                    shutil.rmtree(old, onerror=_tolerating_gone)
        path = runs / name
        path.mkdir()
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path, lock


def _tolerating_gone(function: object, path: str, caught: tuple[Any, BaseException, Any]) -> None:
    """Accept that what is to be removed is gone: a mount namespace of the run ends by itself, and takes files along."""
    if not isinstance(caught[1], FileNotFoundError):
        raise caught[1]


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

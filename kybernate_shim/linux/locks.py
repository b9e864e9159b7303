"""Locks between the processes of a node. The kernel releases one with its last descriptor, so no killed holder has one.

A lock is a descriptor: `held` closes it. Imported by every `start` and `delete`, so this imports next to nothing.
Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.linux.private_files import FILE_MODE

POLL_SECONDS = 0.005  # flock(2) has no deadline
FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def lock_file(path: Path, *, shared: bool = False) -> int:
    """Wait for the lock of a file, which is made, of mode 0600, where it is missing. Raises OSError.

    `shared` excludes only those that are not shared.
    """
    while True:
        fd = _locked(os.open(path, FILE, FILE_MODE), fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        if _is_there(fd):
            return fd


def try_lock_file(path: Path, *, seconds: float = 0) -> int | None:
    """Lock a file as `lock_file` does; None where another holder does not release it in so many seconds."""
    until = time.monotonic() + seconds
    while True:
        fd = _tried(os.open(path, FILE, FILE_MODE))
        if fd is not None and _is_there(fd):
            return fd
        if fd is None:
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_SECONDS)


def lock_directory(path: Path) -> int:
    """Wait for the lock of a directory that exists. Raises OSError."""
    return _locked(os.open(path, DIRECTORY), fcntl.LOCK_EX)


def try_lock_directory(path: Path, *, shared: bool = False) -> int | None:
    """Lock a directory that exists, or return None where it is locked; `shared` excludes only those that are not.

    Raises OSError.
    """
    return _tried(os.open(path, DIRECTORY), fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def lock_open(fd: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock what is open, or return False where it is locked and `wait` is not set. It stays open. Raises OSError."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def held(lock: int | None) -> Iterator[bool]:
    """Release a lock at the end. Yields whether there is one."""
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _locked(fd: int, kind: int) -> int:
    try:
        fcntl.flock(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _tried(fd: int, kind: int = fcntl.LOCK_EX) -> int | None:
    try:
        return _locked(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _is_there(fd: int) -> bool:
    """Return whether the locked file is still at its path; close it where its last holder has removed it."""
    if os.fstat(fd).st_nlink:
        return True
    os.close(fd)
    return False

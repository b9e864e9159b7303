"""Finds names of files by their inodes, below a directory in which others may rename anything meanwhile.

Every directory is opened below an open one, without following a link and without entering another filesystem, and only
names are the result. The search has an end, however many directories there are and however long their names.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Final

from kybernate_shim.linux import openat2
from kybernate_shim.linux.beneath import BELOW, MOST_DIRECTORY_BYTES, open_directory
from kybernate_shim.linux.plain_files import LOOK
from kybernate_shim.linux.statx import FileStatus, status_at

MOST_DIRECTORIES: Final = 1 << 18
MOST_SECONDS: Final = 10.0

Identity = tuple[int, int]  # device and inode, as stat(2) has them


@contextmanager
def root_of(pid: int, directory: str = "/") -> Iterator[int]:
    """Open a directory of a process's root filesystem, from which no link leads. Raises OSError."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = openat2.open_in_root(root, directory, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(root)
    try:
        yield top
    finally:
        os.close(top)


def real_path(root: int, path: str) -> str:
    """Return an absolute path below the open root of a process, with the links on the way to its last part followed.

    Where a directory on the way is not there, the rest stays as it is.
    """
    whole = PurePosixPath("/", path.lstrip("/"))
    for above in whole.parents:
        with suppress(OSError):
            directory = openat2.open_in_root(root, str(above), os.O_PATH | os.O_DIRECTORY)
            try:
                real = os.readlink(f"/proc/self/fd/{directory}")  # noqa: PTH115  # a link of the kernel's
            finally:
                os.close(directory)
            return os.path.normpath(PurePosixPath(real, whole.relative_to(above)))
    return path


def find_names(top: int, wanted: Collection[Identity], first: Sequence[str] = ()) -> dict[Identity, str]:
    """Return a name below the open directory `top` for each file that is found; directories `first` are tried first.

    The search ends when all are found, and within limits of time, and of directories and of the bytes of their names.
    Raises no OSError.
    """
    pending = deque([*first, "."])
    inodes = {inode for _, inode in wanted}
    seen: set[str] = set()
    found: dict[Identity, str] = {}
    room = MOST_DIRECTORY_BYTES
    until = time.monotonic() + MOST_SECONDS
    while pending and len(found) < len(wanted) and len(seen) < MOST_DIRECTORIES and time.monotonic() < until:
        directory = pending.popleft()
        if directory not in seen:
            seen.add(directory)
            names, below = _listed(top, directory, inodes, room, until)
            pending += below
            room -= sum(map(len, below))
            for name in names:
                identity = identity_of(top, name)
                if identity in wanted and identity is not None:
                    found.setdefault(identity, name)
    return found


def identity_of(top: int, name: str) -> Identity | None:
    """Return what is at a name below an open directory, or the link itself; None where there is nothing."""
    status = look(top, name)
    return (status.st_dev, status.st_ino) if status is not None else None


def look(top: int, path: str) -> FileStatus | None:
    """Return the status of what is at a path below an open directory, or of a link itself; None where there is none."""
    try:
        found = openat2.openat2(top, path.strip("/") or ".", LOOK, BELOW)
    except OSError:
        return None
    try:
        return status_at(found)
    finally:
        os.close(found)


def _listed(top: int, directory: str, inodes: Collection[int], room: int, until: float) -> tuple[list[str], list[str]]:
    """Return the names in a directory that have one of the inodes, and those of its directories.

    All have `room` characters at most. It is read until that moment of the monotonic clock.
    """
    try:
        fd = open_directory(top, directory)
    except OSError:
        return [], []  # it is gone, or another filesystem
    prefix = "" if directory == "." else f"{directory}/"
    names: list[str] = ["."] if directory == "." else []
    below: list[str] = []
    try:
        with os.scandir(fd) as entries:
            for number, entry in enumerate(entries, 1):
                size = len(prefix) + len(entry.name)
                for wanted, kept in (
                    (entry.inode() in inodes, names),
                    (entry.is_dir(follow_symlinks=False), below),
                ):
                    if wanted and size <= room:
                        room -= size
                        kept.append(prefix + entry.name)
                if not number & 0xFFF and time.monotonic() > until:
                    break
    finally:
        os.close(fd)
    return names, below

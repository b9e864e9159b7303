"""Files below a directory in which others may rename and replace anything while it is read.

A path is resolved again by each call that takes it, so what was looked at need not be what is opened: a directory that
is exchanged for a link leads such a walk to any file of the node. Here a name is resolved once, by the kernel, below a
directory that is open: no link is followed, no other mount is entered, nothing is above. What it names is pinned by a
descriptor that opens nothing yet (O_PATH), so that no FIFO waits for a writer and no device acts, and everything else
is done to that descriptor. Sources: openat2(2); open(2), O_PATH; proc(5), /proc/self/fd.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kybernate_shim.linux import openat2
from kybernate_shim.linux.plain_files import DIRECTORY, LOOK, READ

BELOW: Final = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
RULES: Final = BELOW | openat2.RESOLVE_NO_XDEV
MOST_FILES: Final = 1 << 22
MOST_DIRECTORY_BYTES: Final = 64 << 20  # of the names of all directories together, which a walk remembers
MOST_LISTED_BYTES: Final = 256 << 20  # of memory for the names in one directory, each of which takes ENTRY besides
MOST_LINKED_BYTES: Final = 256 << 20  # of memory for the names of files that have several
MOST_ATTRIBUTES: Final = 1 << 20  # bytes of one file's; XFS lets a file have thousands of 64 KiB each
ENTRY: Final = 128
LINKED_ENTRY: Final = 256
GONE: Final = (errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EXDEV)  # errors of opening what is no directory any more
READABLE: Final = (stat.S_IFDIR, stat.S_IFREG)
LONGEST_NAME: Final = 4096  # bytes below the top; source: linux/limits.h, PATH_MAX


def tree_changed(name: str, why: str = "replaced while the tree was read") -> OSError:
    """Return the error: a file was replaced while the tree was read."""
    return OSError(errno.ESTALE, why, name)


def tree_too_large(name: str, why: str) -> OSError:
    """Return the error: the tree has more, deeper or longer names than a walk accepts."""
    return OSError(errno.E2BIG, why, name)


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file of a tree, held by a descriptor until the next one is asked for.

    `name` is its path below the top, "." the top itself.

    A directory and a regular file can be read by it; any other file is pinned (O_PATH), even a link.
    """

    name: str
    fd: int
    status: os.stat_result

    @property
    def base(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]

    def link(self) -> str:
        """Return where a symbolic link leads."""
        return os.readlink("", dir_fd=self.fd)

    def attributes(self) -> dict[str, bytes]:
        """Return the extended attributes, in the kernel's order, without those that are removed meanwhile.

        Raises OSError, also where they have more than MOST_ATTRIBUTES bytes.
        """
        place = self.fd if stat.S_IFMT(self.status.st_mode) in READABLE else path_of(self.fd)
        found: dict[str, bytes] = {}
        size = 0
        for name in os.listxattr(place):
            try:
                found[name] = os.getxattr(place, name)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
            else:
                size += len(name) + len(found[name])
                if size > MOST_ATTRIBUTES:
                    raise tree_too_large(self.name, f"more than {MOST_ATTRIBUTES} bytes of attributes")
        return found


@dataclass
class FirstNames:
    """The first names of files that have several, each of which is found by any of its names."""

    _names: dict[tuple[int, int], str] = field(default_factory=dict)
    _bytes: int = 0

    def of(self, found: TreeFile) -> str:
        """Return the name by which a file was found first, which may be this one.

        Raises OSError where that is more than is remembered.
        """
        status = found.status
        if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode):
            return found.name
        first = self._names.setdefault((status.st_dev, status.st_ino), found.name)
        if first is found.name:
            self._bytes += len(os.fsencode(first)) + LINKED_ENTRY
            if self._bytes > MOST_LINKED_BYTES:
                raise tree_too_large(first, f"more than {len(self._names) - 1} files that have several names")
        return first


@dataclass(frozen=True)
class Limits:
    """What a walk accepts: files of all kinds, bytes of the names of all directories, bytes of one name, and bytes of
    memory for the names in one directory.
    """

    files: int = MOST_FILES
    directory_bytes: int = MOST_DIRECTORY_BYTES
    name: int = LONGEST_NAME
    listed_bytes: int = MOST_LISTED_BYTES


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def path_of(fd: int) -> str:
    """Return a path that leads to what a descriptor stands for, and to nothing else."""
    return f"/proc/self/fd/{fd}"


def open_top(path: Path) -> int:
    """Open the top of a tree by a path that only root can change, except the last part, which must not be a link."""
    return os.open(path, DIRECTORY)


def pin(directory: int, name: str) -> int:
    """Return a descriptor (O_PATH) of what `name` is below an open directory, even if it is a link. Raises OSError."""
    return openat2.openat2(directory, name, LOOK, RULES)


def open_directory(directory: int, name: str) -> int:
    """Open the directory `name` below an open one, to read it or what is in it. Raises OSError, also for a link."""
    return openat2.openat2(directory, name, DIRECTORY, RULES)


def walk(
    top: int,
    *,
    skip: Callable[[str], bool] = lambda name: False,
    check: Callable[[], None] = lambda: None,
    limits: Limits | None = None,
    changing: bool = False,
    read: bool = True,
) -> Iterator[TreeFile]:
    """Yield the top of a tree and all below, a directory before its content, in the order of names.

    Files for which `skip` is true are left out, with all below. `check` is called before each file, and ends the walk
    by what it raises. With `changing`, what is gone or was replaced meanwhile is left out. Without `read`, regular
    files are pinned like all others. Raises OSError.
    """
    yield from _TreeWalk(top, skip, check, limits or Limits(), changing, read).all()


@dataclass
class _TreeWalk:
    """A walk that runs. It keeps names and not descriptors, of which a process has few."""

    top: int
    skip: Callable[[str], bool]
    check: Callable[[], None]
    limits: Limits
    changing: bool
    read: bool
    files: int = 0
    directory_bytes: int = 0
    pending: list[tuple[str, os.stat_result | None]] = field(default_factory=lambda: [(".", None)])

    def all(self) -> Iterator[TreeFile]:
        while self.pending:
            self.check()
            name, before = self.pending.pop()
            fd = self._opened(name, before)
            if fd is None:
                continue
            with closing(fd):
                yield TreeFile(name, fd, os.fstat(fd))
                yield from self._inside(name, fd)

    def _opened(self, name: str, before: os.stat_result | None) -> int | None:
        """Open a directory that was found before; None where it may have been replaced."""
        try:
            fd = open_directory(self.top, name)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._changed(name, error)
            return None
        if before is None or os.path.samestat(before, os.fstat(fd)):
            return fd
        os.close(fd)
        self._changed(name)
        return None

    def _changed(self, name: str, cause: OSError | None = None) -> None:
        """Raise OSError, unless that is what happens in this tree."""
        if not self.changing:
            raise tree_changed(name) from cause

    def _inside(self, directory: str, fd: int) -> Iterator[TreeFile]:
        """Yield the files in a directory, and note its directories for later."""
        for base, is_directory in self._listed(directory, fd):
            name = base if directory == "." else f"{directory}/{base}"
            if self.skip(name):
                continue
            self.check()
            if len(os.fsencode(name)) > self.limits.name:
                raise tree_too_large(f"{name[:60]}…", f"a path of more than {self.limits.name} bytes")
            held = self._held(fd, base, name)
            if held is None:
                continue
            inner, status = held
            try:
                if stat.S_ISDIR(status.st_mode) != is_directory:
                    self._changed(name)
                elif is_directory:
                    self._note(name, status)
                else:
                    yield TreeFile(name, inner, status)
            finally:
                os.close(inner)

    def _listed(self, directory: str, fd: int) -> list[tuple[str, bool]]:
        """Return names, sorted, and whether each one is that of a directory."""
        found: list[tuple[str, bool]] = []
        size = 0
        with os.scandir(fd) as entries:
            for entry in entries:
                self.files += 1
                if self.files > self.limits.files:
                    raise tree_too_large(directory, f"more than {self.limits.files} files")
                size += ENTRY + len(entry.name)
                if size > self.limits.listed_bytes:
                    raise tree_too_large(directory, f"a directory of more than {len(found)} names")
                if not self.files & 0xFFF:
                    self.check()
                found.append((entry.name, entry.is_dir(follow_symlinks=False)))
        return sorted(found)

    def _held(self, directory: int, base: str, name: str) -> tuple[int, os.stat_result] | None:
        """Return a file's descriptor, for reading if it is a regular one, so that no later call blocks; and its status.

        None where it may be gone.
        """
        try:
            pinned = pin(directory, base)
        except FileNotFoundError as error:
            self._changed(name, error)
            return None
        status = os.fstat(pinned)
        if not self.read or not stat.S_ISREG(status.st_mode):
            return pinned, status
        try:
            opened = os.open(path_of(pinned), READ)
            return opened, os.fstat(opened)
        except BlockingIOError as error:
            raise tree_changed(name, "held by a lease, which its holder must give up first") from error
        finally:
            os.close(pinned)

    def _note(self, name: str, status: os.stat_result) -> None:
        self.directory_bytes += len(os.fsencode(name))
        if self.directory_bytes > self.limits.directory_bytes:
            raise tree_too_large(name, f"directories with more than {self.limits.directory_bytes} bytes of names")
        self.pending.append((name, status))

"""Files of Kybernate that other users can read or change: what was copied, or changed by hand.

Images hold the memory of containers, with their keys and passwords. Everything is reached through descriptors, from /
down, and no link is followed: what was looked at is what is changed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.config import DEFAULT_PATH, Config
from kybernate_shim.linux.plain_files import LOOK
from kybernate_shim.run_directory import RUN
from kybernate_shim.trust.places import OPEN, WRITABLE

STATE = Path("/var/lib/kybernate")  # images, work directories, keys
# What the node agent opens on purpose: to readers' group, to pass through and to connect; to containers, to connect.
PERMITTED = {
    "": stat.S_IXGRP,
    "agent.sock": 0o660,
    "self": 0o755,
    "self/agent.sock": 0o666,
}
MARKS = {NAME, "inventory.img"}  # a directory with one of these is an image, or the rest of one
WORKS = (".checkpoint", ".restore")  # ends of the names of work directories
DEPTH = 2  # levels of directories between a root and its images
_KINDS = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFSOCK: "socket", stat.S_IFIFO: "FIFO"}


@dataclass(frozen=True)
class Exposed:
    """One file or directory. `mode` is what it has, `wanted` what it should have; `uid` owns it."""

    path: str
    kind: str
    mode: int
    wanted: int
    uid: int

    def __str__(self) -> str:
        owner = f", uid {self.uid}" if self.uid else ""
        return f"{self.path} ({self.kind}, mode {self.mode:04o}{owner})"


def find(config: Config) -> list[Exposed]:
    """Return what is too open below the node's places. Raises OSError where it cannot be looked at.

    Directories that are Kybernate's by their name are looked at as a whole. In those that the configuration names, only
    images, work directories and logs are, because other files may lie there.
    """
    found = {one.path: one for one in _all(config)}
    return [found[path] for path in sorted(found)]


def _all(config: Config) -> Iterator[Exposed]:
    logs, keys = (config.log_file, config.audit_log), (config.key_directory, config.shared_key)
    for place in (STATE, RUN, config.gpu.image_pool, *logs, *keys):
        if place is not None:
            yield from _below(place)
    for place in (config.work_root, *(root for root, _ in config.image_roots)):
        yield from _holding(place)
    yield from _configuration(DEFAULT_PATH)


def repair(exposed: Exposed) -> None:
    """Take the permissions of group and others from it. Raises OSError; it is as it was then.

    The error is PermissionError where something else is in its place by now, or where this would not help.
    """
    with _opened(Path(exposed.path)) as fd:
        status = os.fstat(fd)
        if _KINDS.get(stat.S_IFMT(status.st_mode)) != exposed.kind:
            raise PermissionError(f"{exposed.path} has been replaced; it was not changed")
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{exposed.path} belongs to uid {status.st_uid}: remove it, or chown root")
        if exposed.kind == "file" and status.st_nlink > 1:
            raise PermissionError(f"{exposed.path} has other names as well: remove it, or chmod {exposed.wanted:04o}")
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(status.st_mode) & exposed.wanted)  # noqa: PTH101  # of O_PATH


def _below(place: Path) -> Iterator[Exposed]:
    try:
        with _opened(place) as fd:
            yield from _judged(fd, str(place))
    except (FileNotFoundError, NotADirectoryError):
        return  # it is allocated at its first use


def _judged(fd: int, path: str) -> Iterator[Exposed]:
    status = os.fstat(fd)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        return  # a link, which has no mode, or a device
    mode = stat.S_IMODE(status.st_mode)
    permitted = _permitted(path)
    if mode & OPEN & ~permitted or status.st_uid not in (0, os.geteuid()):
        yield Exposed(path, kind, mode, mode & (~OPEN | permitted), status.st_uid)
    if kind == "directory":
        yield from _inside(fd, path)


def _permitted(path: str) -> int:
    """Return what others may have of a path below RUN, 0 elsewhere."""
    place = Path(path)
    return PERMITTED.get(str(place.relative_to(RUN)).removeprefix("."), 0) if place.is_relative_to(RUN) else 0


def _inside(directory: int, path: str) -> Iterator[Exposed]:
    for name in sorted(_names(directory)):
        try:
            fd = os.open(name, LOOK, dir_fd=directory)
        except FileNotFoundError:
            continue  # it has been removed in the meantime
        try:
            yield from _judged(fd, f"{path}/{name}")
        finally:
            os.close(fd)


def _names(directory: int) -> list[str]:
    readable = os.open(f"/proc/self/fd/{directory}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.listdir(readable)  # noqa: PTH208  # a descriptor
    finally:
        os.close(readable)


def _holding(root: Path) -> Iterator[Exposed]:
    """Yield what is too open of a directory that holds images or work directories: others may read, not change it."""
    try:
        with _opened(root) as fd:
            yield from _changeable(fd, str(root))
            yield from _images(fd, str(root), DEPTH)
    except (FileNotFoundError, NotADirectoryError):
        return


def _images(directory: int, path: str, depth: int) -> Iterator[Exposed]:
    for name in sorted(_names(directory)):
        try:
            fd = os.open(name, LOOK | os.O_DIRECTORY, dir_fd=directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if name.endswith(WORKS) or MARKS & set(_names(fd)):
                yield from _judged(fd, f"{path}/{name}")
            elif depth:
                yield from _images(fd, f"{path}/{name}", depth - 1)
        finally:
            os.close(fd)


def _configuration(file: Path) -> Iterator[Exposed]:
    """Yield the node's configuration where other users can change it; they may read it."""
    for path in (file.parent, file):
        try:
            with _opened(path) as fd:
                yield from _changeable(fd, str(path))
        except (FileNotFoundError, NotADirectoryError):
            return


def _changeable(fd: int, path: str) -> Iterator[Exposed]:
    status = os.fstat(fd)
    kind, mode = _KINDS.get(stat.S_IFMT(status.st_mode)), stat.S_IMODE(status.st_mode)
    if kind is not None and (mode & WRITABLE or status.st_uid not in (0, os.geteuid())):
        yield Exposed(path, kind, mode, mode & ~WRITABLE, status.st_uid)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a path for its metadata, component by component; no link is followed. Raises OSError."""
    fd = os.open("/", LOOK | os.O_DIRECTORY)
    try:
        for part in path.parts[1:]:
            inner = os.open(part, LOOK, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)

"""Directories for images, logs and scratch files: only root can write to them or replace them.

A directory is found from / through descriptors, one component at a time, so that what was checked is what is used. Its
parents are checked as well: a user who can write to a parent can replace the directory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kybernate_shim.errors import Refused
from kybernate_shim.linux.plain_files import LOOK
from kybernate_shim.linux.private_files import DIRECTORY_MODE

LINKS: Final = 40  # as many as the kernel follows
WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
OPEN: Final = stat.S_IRWXG | stat.S_IRWXO


def require_private(path: Path) -> None:
    """Raise Refused unless only root can write to the directory `path` and replace it.

    It must be a directory, not a link, that belongs to root or to our own effective user, and neither its group nor
    others may write to it. The same holds for its parents. A parent may be writable when it has the sticky bit, as /tmp
    has, and a link among the parents is followed if it belongs to root. Others may read `path`. Raises
    FileNotFoundError, and OSError.
    """
    os.close(_walk(path, make=False)[0])


def make_private(path: Path) -> bool:
    """Do as `require_private`, and make missing directories with mode 0700. Return whether `path` itself was made."""
    fd, made = _walk(path, make=True)
    os.close(fd)
    return made


def close_to_others(path: Path, *, empty: bool) -> None:
    """Give a directory that passes `require_private` the mode 0700, if it has another one.

    Only an `empty` one is changed, because a directory with other content may be meant for other users: that raises
    Refused.
    """
    fd, _ = _walk(path, make=False)
    try:
        status = os.fstat(fd)
        if not status.st_mode & OPEN:
            return
        if not empty:
            raise Refused(
                f"{path} ({_described(status)}) can be read by other users, and contains other files already."
                f" Nothing was written. Choose another directory, or close this one: chmod 0700 {path}"
            )
        os.chmod(f"/proc/self/fd/{fd}", DIRECTORY_MODE)  # noqa: PTH101  # a descriptor, which has no mode
    finally:
        os.close(fd)


def _walk(path: Path, *, make: bool) -> tuple[int, bool]:
    """Return a descriptor (O_PATH) of the directory `path`, and whether it was made."""
    if not path.is_absolute():
        raise Refused(f"{path}: an absolute path is needed")
    walk = _Walk()
    try:
        walk.follow(list(path.parts[1:]), make=make)
        return os.dup(walk.fd), walk.made
    finally:
        walk.close()


class _Walk:
    """A path from / down to a directory: a descriptor for each component, all of them checked."""

    def __init__(self) -> None:
        self._fds = [os.open("/", LOOK | os.O_DIRECTORY)]
        self._names = [Path("/")]
        self._links = 0
        self.made = False

    @property
    def fd(self) -> int:
        return self._fds[-1]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def follow(self, parts: list[str], *, make: bool) -> None:
        _judge(self._names[-1], os.fstat(self.fd), last=not parts)
        while parts:
            part = parts.pop(0)
            if part == "..":
                self._up()
                continue
            fd = self._open(part, make=make)
            name, status = self._names[-1] / part, os.fstat(fd)
            if stat.S_ISLNK(status.st_mode):
                try:
                    target = self._target(fd, name, status, last=not parts)
                finally:
                    os.close(fd)
                parts[:0] = target
                continue
            self._fds.append(fd)
            self._names.append(name)
            _judge(name, status, last=not parts)

    def _up(self) -> None:
        if len(self._fds) > 1:
            os.close(self._fds.pop())
            self._names.pop()

    def _open(self, part: str, *, make: bool) -> int:
        self.made = False
        try:
            return os.open(part, LOOK, dir_fd=self.fd)
        except FileNotFoundError as error:
            if not make:
                raise FileNotFoundError(error.errno, error.strerror, str(self._names[-1] / part)) from error
        try:
            os.mkdir(part, DIRECTORY_MODE, dir_fd=self.fd)  # Path has no directory's descriptor
            self.made = True
        except FileExistsError:
            pass  # another daemon was faster
        return os.open(part, LOOK, dir_fd=self.fd)

    def _target(self, fd: int, name: Path, status: os.stat_result, *, last: bool) -> list[str]:
        """Return the components of the link's target; go back to / first where it is absolute."""
        target = Path(os.readlink("", dir_fd=fd))  # of the descriptor itself
        if last:
            raise Refused(f"{name} is a link to {target}: name the directory itself")
        if status.st_uid not in _trusted():
            raise Refused(f"{name} is a link of uid {status.st_uid}: name the directory itself")
        self._links += 1
        if self._links > LINKS:
            raise Refused(f"{name}: more than {LINKS} links")
        if target.is_absolute():
            while len(self._fds) > 1:
                self._up()
        return [part for part in target.parts if part != "/"]


def _judge(name: Path, status: os.stat_result, *, last: bool) -> None:
    """Raise Refused for a component that another user can change."""
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(f"{name}: Not a directory: name another one")
    described = _described(status)
    if status.st_uid not in _trusted():
        raise Refused(
            f"{name} ({described}) belongs to another user, who can replace what is in it. "
            f"Nothing was written. Name a directory of root's, or: chown root {name}"
        )
    if status.st_mode & WRITABLE and (last or not status.st_mode & stat.S_ISVTX):
        mode = "0700" if last else "go-w"
        raise Refused(
            f"{name} ({described}) can be written to by other users. "
            f"Nothing was written. Name another directory, or: chmod {mode} {name}"
        )


def _described(status: os.stat_result) -> str:
    return f"uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


def _trusted() -> tuple[int, int]:
    return 0, os.geteuid()

"""Finds, while a container is frozen, the names that a restore needs and that CRIU's images do not have."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.bound_sockets import file_of, is_bound_again
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.criu.opened import Opened, OpenedPath
from kybernate_shim.checkpoint.names import RULES, Name, Names, look
from kybernate_shim.checkpoint.sockets import Socket
from kybernate_shim.linux import openat2
from kybernate_shim.linux.held_files import DELETED, HeldFile, held_files
from kybernate_shim.linux.plain_files import DIRECTORY
from kybernate_shim.linux.process import title_of
from kybernate_shim.messages import criu_pb2 as criu

MOST_SEARCHED: Final = 1 << 20  # names of a filesystem that are looked at for one file
MOST_SECONDS: Final = 10.0
INSIDE: Final = RULES | openat2.RESOLVE_NO_XDEV


@dataclass
class Found:
    """The names, and sentences about those that are not to be found."""

    links: list[Name] = field(default_factory=list)
    sockets: list[Name] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> Names:
        return Names(tuple(self.links), tuple(self.sockets))


def find(
    opened: Opened, mounts: Iterable[DumpedMount], sockets: Iterable[Socket], pids: Sequence[int], init: int
) -> Found:
    """Return the names for a dump whose processes are frozen. `mounts` are those of the images, the root left out."""
    found, by_id = Found(), {mount.id: mount for mount in mounts}
    linked = [one for one in opened.remaps if one.kind == criu.Remap.LINKED]
    if linked:
        held = [one for one in held_files(pids, mapped=True) if one.removed]
        for remap in linked:
            _find_link(found, opened.paths.get(remap.file), opened.paths.get(remap.target), by_id, held)
    for socket in sockets:
        if is_bound_again(socket):
            _find_socket(found, socket, opened, by_id.values(), init)
    return found


def _find_link(
    found: Found,
    former: OpenedPath | None,
    link: OpenedPath | None,
    mounts: Mapping[int, DumpedMount],
    held: Sequence[HeldFile],
) -> None:
    """Find another name of a file that was removed under the name `former`, for which CRIU's images name `link`."""
    if former is None or link is None:
        found.problems.append("CRIU's list of removed files names one that is not in its list of files")
        return
    mount = mounts.get(former.mount)
    if mount is not None and not mount.key:
        return  # the content of this filesystem is in CRIU's images, with CRIU's link
    holders = [one for one in held if one.path == former.path]
    files = {_identity(one): one for one in holders}
    files.pop(None, None)
    if len(files) != 1:
        what = "no process has it open" if not files else f"{len(files)} files had that name"
        found.problems.append(f"{former.path!a} was removed, and {what}")
        return
    ((identity, holder),) = files.items()
    assert identity is not None
    where = mount.destination if mount is not None else "/"
    with _top(holder.pid, where) as top:
        other = _other_name(top, former.path.removeprefix(where).strip("/"), identity)
    if other is None:
        found.problems.append(
            f"{holder}, which was removed while the file has another name; no other name was found in the filesystem"
            f" at {where}: give it one there, or let the program close it"
        )
    else:
        found.links.append(Name(link.path, str(Path(where, other)), where))


def _identity(held: HeldFile) -> tuple[int, int] | None:
    try:
        status = os.stat(held.place)  # noqa: PTH116  # a link of the kernel's
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


@contextmanager
def _top(pid: int, destination: str) -> Iterator[int]:
    """Open the directory at a mount of a process's."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = openat2.open_in_root(root, destination, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(root)
    try:
        yield top
    finally:
        os.close(top)


def _other_name(top: int, former: str, identity: tuple[int, int]) -> str | None:
    """Return a name of a file below `top`: mostly one next to its former name, else any of the filesystem."""
    pending = deque(str(parent) for parent in Path(former).parents)
    seen: set[str] = set()
    until, searched = time.monotonic() + MOST_SECONDS, 0
    while pending and searched < MOST_SEARCHED and time.monotonic() < until:
        directory = pending.popleft()
        if directory in seen:
            continue
        seen.add(directory)
        names, below = _listed(top, directory, identity[1])
        searched += 1 + len(below)
        pending += below
        for name in names:
            status = look(top, name)
            if status is not None and (status.st_dev, status.st_ino) == identity:
                return name
    return None


def _listed(top: int, directory: str, inode: int) -> tuple[list[str], list[str]]:
    """Return the names in a directory that have the number of an inode, and those of its directories."""
    try:
        fd = openat2.openat2(top, directory, DIRECTORY, INSIDE)
    except OSError:
        return [], []  # it is gone, or another filesystem
    try:
        prefix = "" if directory == "." else f"{directory}/"
        names, below = [], []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.inode() == inode:
                    names.append(prefix + entry.name)
                if entry.is_dir(follow_symlinks=False):
                    below.append(prefix + entry.name)
        return names, below
    finally:
        os.close(fd)


def _find_socket(found: Found, socket: Socket, opened: Opened, mounts: Iterable[DumpedMount], init: int) -> None:
    """Find out whether a socket lies where CRIU will bind it."""
    try:
        path, _, status = file_of(socket)
    except OSError:
        return  # it was closed: a socket that is in flight has no holder
    bound = socket.local
    title = f"{title_of(socket.holder[0])} has the UNIX socket {bound!a} open as its descriptor {socket.holder[1]}"
    if path.endswith(DELETED):
        if status.st_nlink:
            found.problems.append(
                f"{title}; its name was removed while its file has another one, where CRIU does not bind it: rename"
                " sockets instead of linking them, or let the program bind it again"
            )
        return
    if not bound.startswith("/") or os.path.normpath(bound) == path:
        return
    title += f", which was renamed to {path!a}"
    if status.st_nlink > 1:
        found.problems.append(f"{title} and has {status.st_nlink} names: a restore can make one alone")
        return
    if problem := _obstacle(bound, opened, init):
        found.problems.append(f"{title}; {problem}")
        return
    mount = max((one for one in mounts if Path(bound).is_relative_to(one.destination)), key=_depth, default=None)
    missing = _missing(bound, init)
    if missing and mount is not None and not mount.key:
        found.problems.append(f"{title}; the directory {missing!a}, in which CRIU would bind it, was removed")
        return
    found.sockets.append(Name(bound, path, mount.destination if mount is not None else "/", missing))


def _depth(mount: DumpedMount) -> int:
    return mount.destination.count("/")


def _obstacle(bound: str, opened: Opened, init: int) -> str:
    """Return why CRIU cannot bind a socket to that path for a moment, "" where it can."""
    if sum(one.path == bound for one in opened.sockets) > 1:
        return "another socket is bound to that path now, and a restore can bind only one of them there"
    with _top(init, "/") as top:
        status = look(top, bound)
    if status is not None and not _is_socket(status):
        return "another file has that name now, and a restore could not bind the socket there"
    return ""


def _is_socket(status: os.stat_result) -> bool:
    return status.st_mode & 0o170000 == 0o140000


def _missing(bound: str, init: int) -> str:
    """Return the topmost directory on the way to a path that there is not any more, "" where all are there."""
    with _top(init, "/") as top:
        above = reversed(Path(bound).parents)
        return next((str(one) for one in above if str(one) != "/" and look(top, str(one)) is None), "")

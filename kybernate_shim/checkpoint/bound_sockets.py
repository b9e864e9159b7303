"""UNIX sockets in directories that a restore without the changed files of the root filesystem does not have.

CRIU binds each socket to its path again, but makes the directory only for a socket whose path is gone. Python's
multiprocessing, for one, binds sockets in a new directory below /tmp. Whether a directory is in the image of the
container is decided by the layers of its overlay; what is on another mount is restored with that.
Sources: CRIU's sk-unix.c, `unix_resolve_name` and `bind_unix_sk`; the kernel's unix_open_file (SIOCUNIXFILE).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fcntl import ioctl
from functools import cache
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.rootfs.overlay import Overlay, find_overlay
from kybernate_shim.checkpoint.sockets import Socket
from kybernate_shim.errors import Refused
from kybernate_shim.linux.descriptors import mount_of
from kybernate_shim.linux.held_files import DELETED
from kybernate_shim.linux.libc import pidfd_getfd
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_mountinfo
from kybernate_shim.linux.process import title_of
from kybernate_shim.linux.statx import FileStatus, status_at

SIOCUNIXFILE: Final = 0x89E0
SHOWN: Final = 3


def socket_directory_not_saved(container: str, unbindable: Sequence[Unbindable]) -> Refused:
    """Return why a UNIX socket could not be bound by a restore: its directory would not be in the image."""
    return Refused(
        f"{described(unbindable)}: the container has created the directory, and without the changed files of the"
        " root"
        " filesystem a restore cannot bind the socket there. Leave --no-rootfs away, or use --force where the new"
        f" container has the directory; container {container} continues as before"
    )


@dataclass(frozen=True)
class Unbindable:
    """A socket's path in the container, and the pid of a process that has it open."""

    path: str
    pid: int


def described(unbindable: Sequence[Unbindable]) -> str:
    """Say which process has which socket open."""
    some = [f"{title_of(one.pid)} has the UNIX socket {one.path!a} open" for one in unbindable[:SHOWN]]
    more = len(unbindable) - SHOWN
    return ", ".join(some) + (f" and there are {more} more" if more > 0 else "")


def without_directory(sockets: Iterable[Socket], init_pid: int, rootfs: Path) -> list[Unbindable]:
    """Return the sockets that could not be bound in a container with a root filesystem fresh from its image.

    None where that is not known: on other filesystems than overlay, or with layers that cannot be reached. What is
    closed, or ends, meanwhile is left out: ask while the processes are frozen.
    """
    bound = [socket for socket in sockets if is_bound_again(socket)]
    if not bound:
        return []
    try:
        overlay = find_overlay(rootfs)
    except Refused:
        return []
    return list(_without_directory(bound, init_pid, overlay)) if overlay.lower else []


def is_bound_again(socket: Socket) -> bool:
    """Return whether CRIU binds a socket to a path.

    It does not bind one that was accepted or has connected, except for datagrams.
    """
    return socket.is_file and (socket.datagram or socket.state != "established")


def _without_directory(sockets: Iterable[Socket], init_pid: int, overlay: Overlay) -> Iterator[Unbindable]:
    mounts_of = cache(lambda pid: {one.id: one for one in [*read_mountinfo(pid), *read_mountinfo(init_pid)]})
    for socket in sockets:
        pid, _ = socket.holder
        try:
            path, mount_id, _ = file_of(socket)
            mounts = mounts_of(pid)
        except OSError:
            continue
        if path.endswith(DELETED) and socket.local.startswith("/"):
            continue  # CRIU makes the directories for the moment
        mount = mounts.get(mount_id)
        if mount is not None and mount.device == overlay.device:
            directory = Path(path).parent
            if not overlay.in_image(_parts(directory, mount)) and not _is_above(directory, mounts.values()):
                yield Unbindable(path.removesuffix(DELETED), pid)


def file_of(socket: Socket) -> tuple[str, int, FileStatus]:
    """Return the path of a socket's file in its mount namespace, the id of the mount, and the file. Raises OSError."""
    with ExitStack() as undo:
        copy = pidfd_getfd(*socket.holder)
        undo.callback(os.close, copy)
        file = ioctl(copy, SIOCUNIXFILE)
        undo.callback(os.close, file)
        path = os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115
        return path, mount_of(f"/proc/self/fdinfo/{file}"), status_at(file)


def _parts(directory: Path, mount: MountPoint) -> tuple[str, ...]:
    """Return the parts of the path of `directory` in the filesystem of `mount`."""
    inside = directory.relative_to(mount.path) if directory.is_relative_to(mount.path) else directory.relative_to("/")
    return (*Path(mount.root).parts[1:], *inside.parts)


def _is_above(directory: Path, mounts: Iterable[MountPoint]) -> bool:
    """Return whether there is a mount below `directory`: a restore makes its mount point, and what is above."""
    return any(mount.path.is_relative_to(directory) for mount in mounts)

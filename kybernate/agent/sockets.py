"""The agent's listening sockets: those that systemd has opened, else its own, with their owners and modes."""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate_shim.linux.private_files import NO_OTHERS, make_directory

BACKLOG: Final = 128
FOR_READERS: Final = 0o660  # root, and the group of readers
FOR_ROOT: Final = 0o600
FOR_CONTAINERS: Final = 0o666  # who may call is decided by the process, not by the file
PASSABLE: Final = 0o710  # a directory that readers may pass through, without seeing what is in it

SOCKET_UNUSABLE_ADVICE: Final = "look at the path and its directory, or name another one in agent.toml"


def group_of(name: str) -> int | None:
    """Return the number of the node's group with this name, None without one."""
    try:
        return grp.getgrnam(name).gr_gid if name else None
    except KeyError:
        return None


def for_readers(path: Path, group: int | None) -> socket.socket:
    """Open the agent's socket. Raises Failure."""
    try:
        make_directory(path.parent)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", advice=SOCKET_UNUSABLE_ADVICE) from error
    return _opened(path, FOR_ROOT if group is None else FOR_READERS, group)


def admit_readers(path: Path, group: int | None) -> None:
    """Open the directory of the agent's socket to the group, to pass through. Raises Failure."""
    try:
        if group is not None:
            let_pass(path.parent, group)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", advice=SOCKET_UNUSABLE_ADVICE) from error


def let_pass(directory: Path, group: int) -> None:
    """Let a group pass through a directory that is closed to all others; one that is open stays. Raises OSError."""
    status = directory.stat()
    if stat.S_IMODE(status.st_mode) & NO_OTHERS & ~0o010 == 0 and status.st_uid == os.geteuid():
        os.chown(directory, -1, group)
        directory.chmod(PASSABLE)


def for_shims(path: Path) -> socket.socket:
    """Open a socket of root's alone, next to the agent's. Raises Failure."""
    return _opened(path, FOR_ROOT, None)


def for_containers(path: Path) -> socket.socket:
    """Open the restricted socket in a directory of its own, which containers mount. Raises Failure."""
    try:
        make_directory(path.parent.parent)
        _make(path.parent, 0o755)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", advice=SOCKET_UNUSABLE_ADVICE) from error
    return _opened(path, FOR_CONTAINERS, None)


def on_tcp(listen: str) -> socket.socket:
    """Listen on HOST:PORT, IPv4 or IPv6. Raises Failure."""
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise Failure(f"cannot listen on {listen}: {error}", advice=SOCKET_UNUSABLE_ADVICE) from error


def private_directory(beside: Path) -> Path:
    """Return an empty directory of mode 0700 next to the agent's socket, for gRPC's own sockets.

    What an agent that was killed has left in it is removed. Raises Failure.
    """
    path = beside.with_name(f"{beside.stem}.private")
    try:
        make_directory(path)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & NO_OTHERS:
            raise Failure(f"{path} is not a directory that only root can use", advice=SOCKET_UNUSABLE_ADVICE)
        for left in path.iterdir():
            left.unlink()
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", advice=SOCKET_UNUSABLE_ADVICE) from error
    return path


def passed(name: str, given: Mapping[str, socket.socket]) -> socket.socket | None:
    """Return the socket that systemd passes under a name; one without a name of its own is the agent's."""
    found = given.get(name)
    if found is None and name == "agent" and len(given) == 1:
        return next(iter(given.values()))
    return found


def _make(directory: Path, mode: int) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=mode)
        directory.chmod(mode)  # whatever the umask is


def _opened(path: Path, mode: int, group: int | None) -> socket.socket:
    """Listen at `path`. The agent's lock is held, so a socket that lies there is one that a killed agent has left.

    A container that has the directory mounted may exchange the new socket for a link as soon as it is there: so its
    mode is the one that it is made with, and nothing is done to the name afterwards that follows a link.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~mode)
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        if group is not None:
            os.chown(path, -1, group, follow_symlinks=False)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Failure(f"cannot listen on {path}: {error.strerror or error}", advice=SOCKET_UNUSABLE_ADVICE) from error
    finally:
        os.umask(mask)
    return listener

"""A container's sockets, as the kernel lists them, and what a checkpoint and a restore will do to each.

The kernel is asked by sock_diag in the container's network namespace. That may be the whole pod's, so the container's
sockets are those that its own processes hold open.
Sources: sock_diag(7); criu(8), --tcp-established, --tcp-close, --ext-unix-sk; criu.org, "TCP connection".
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from socket import AF_INET, AF_INET6, AF_UNIX, IPPROTO_TCP, SOCK_DGRAM
from typing import Any, Final, Literal

from kybernate_shim.checkpoint.image.manifest import TcpPolicy
from kybernate_shim.linux.credentials import effective_user
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace
from kybernate_shim.linux.sock_diag import diag_socket

Family = Literal["tcp", "unix"]
State = Literal["established", "listening", "opening", "closing", "unconnected"]

# The kernel's numbers of TCP states (include/net/tcp_states.h), which UNIX sockets share as far as they have them.
STATES: Final[dict[int, State]] = {
    1: "established",
    2: "opening",
    3: "opening",
    4: "closing",
    5: "closing",
    6: "closing",
    7: "unconnected",
    8: "closing",
    9: "closing",
    10: "listening",
    11: "closing",
    12: "opening",
}
ALL_STATES: Final = 0xFFF
SHOW_NAME: Final = 1
SHOW_FILE: Final = 2
SHOW_PEER: Final = 4
ANYWHERE: Final = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Socket:
    """One socket. `local` and `peer` are `address:port`, or a UNIX socket's path, with "@" where it is abstract.

    `peer_inode` is the other end of a connected UNIX socket, 0 where there is none; `is_file` says that a UNIX socket
    is bound to a path. `holder` is a process that has it open, and the number of its descriptor.
    """

    family: Family
    state: State
    local: str
    peer: str = ""
    inode: int = 0
    peer_inode: int = 0
    is_file: bool = False
    datagram: bool = False
    holder: tuple[int, int] = (0, -1)


def container_sockets(pids: Sequence[int]) -> list[Socket]:
    """Return the TCP and UNIX sockets that the processes `pids` hold open, all of one network namespace.

    Blocks for as long as the kernel takes to list the namespace. Processes that are gone have none; raises OSError when
    the first one goes in between.
    """
    holders = open_inodes(pids)
    if not holders:
        return []  # the usual case, and cheap: asking the kernel needs a library that takes long to import
    found = in_namespace(Path(f"/proc/{pids[0]}/ns/net"), CLONE_NEWNET, list_sockets)
    return [replace(socket, holder=holders[socket.inode]) for socket in found if socket.inode in holders]


def open_inodes(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the inodes of the sockets that the processes have open, each with one of their pids and its descriptor.

    A process that is gone has none.
    """
    inodes = {}
    for pid in pids:
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if match := re.fullmatch(r"socket:\[(\d+)\]", _target(fd)):
                    inodes[int(match[1])] = pid, int(fd.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return inodes


def list_sockets() -> list[Socket]:
    """Return every TCP and UNIX socket of the calling thread's network namespace."""
    with diag_socket() as diag:
        diag.bind()
        found = []
        for family in (AF_INET, AF_INET6):
            found += [_tcp(m) for m in diag.get_sock_stats(family=family, protocol=IPPROTO_TCP, states=ALL_STATES)]
        found += [_unix(m) for m in diag.get_sock_stats(family=AF_UNIX, show=SHOW_NAME | SHOW_FILE | SHOW_PEER)]
        return found


def what_happens(
    sockets: Sequence[Socket], policy: TcpPolicy, of_others: Sequence[Socket] = (), own: Collection[str] = ()
) -> list[str]:
    """Return for the log what becomes of the sockets at a restore, one sentence for each kind of fate.

    `of_others` are those that `of_other_users` returns, `own` the pod's addresses where another pod's take their place.
    """
    lines = [_listening(socket, own) for socket in sockets if socket.family == "tcp" and socket.state == "listening"]
    connected = [socket for socket in sockets if is_connection(socket)]
    if connected and policy == "close":
        lines.append(f"{len(connected)} TCP connections will be closed: {_some(connected)}")
    elif connected:
        lines.append(
            f"{len(connected)} TCP connections will continue if the address stays the same: {_some(connected)}"
        )
    if outside := external_unix(sockets):
        lines.append(f"{len(outside)} UNIX sockets are connected to processes outside the container: {_some(outside)}")
    if of_others:
        lines.append(
            f"{len(of_others)} UNIX sockets will name root as their peers' user (SO_PEERCRED): {_some(of_others)}"
        )
    return lines


def of_other_users(sockets: Sequence[Socket]) -> list[Socket]:
    """Return the connected and listening UNIX sockets of processes that are not of their container's root.

    The kernel notes a socket's user when it connects or listens, which CRIU does as root; a listening socket's user is
    what those who connect later are shown.
    """
    users = cache(_user_of)
    noted = (one for one in sockets if one.family == "unix" and one.state in ("established", "listening"))
    return [one for one in noted if not one.datagram and users(one.holder[0])]


def _user_of(pid: int) -> int:
    """Return the effective user of a process in its container; 0 for one that has ended."""
    try:
        return effective_user(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_connection(socket: Socket) -> bool:
    """Return whether the socket is a TCP connection, in any state."""
    return socket.family == "tcp" and socket.state in ("established", "opening", "closing")


def needs_network_lock(sockets: Iterable[Socket], policy: TcpPolicy) -> bool:
    """Return whether packets must be held back during a dump: only for connections that are to continue."""
    return policy == "established" and any(map(is_connection, sockets))


def external_unix(sockets: Sequence[Socket]) -> list[Socket]:
    """Return the connected UNIX sockets whose other end is none of `sockets`; CRIU refuses them by default."""
    inodes = {socket.inode for socket in sockets}
    return [socket for socket in sockets if socket.peer_inode and socket.peer_inode not in inodes]


def _listening(socket: Socket, own: Collection[str]) -> str:
    address = socket.local.rpartition(":")[0].strip("[]")
    if address in ANYWHERE or address.startswith("127.") or address == "::1":
        return f"listening on {socket.local} will continue"
    if address in own:
        return f"listening on {socket.local} will continue on the address of the pod that it is restored into"
    return f"listening on {socket.local} will continue only where the network has that address"


def _some(sockets: Sequence[Socket], most: int = 5) -> str:
    names = [f"{socket.local}→{socket.peer}" if socket.peer else socket.local or "unnamed" for socket in sockets]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _tcp(message: Any) -> Socket:
    return Socket(
        "tcp",
        STATES.get(message["idiag_state"], "closing"),
        _address(message["idiag_src"], message["idiag_sport"]),
        _address(message["idiag_dst"], message["idiag_dport"]) if message["idiag_dport"] else "",
        message["idiag_inode"],
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix(message: Any) -> Socket:
    name = message.get_attr("UNIX_DIAG_NAME") or ""
    if isinstance(name, bytes):  # no UTF-8
        name = name.decode(errors="surrogateescape")
    # The NUL that begins an abstract name is lost in decoding; but only a name in the filesystem comes with a file.
    is_file = bool(message.get_attr("UNIX_DIAG_VFS"))
    return Socket(
        "unix",
        STATES.get(message["udiag_state"], "closing"),
        f"@{name}" if name and not is_file else name,
        inode=message["udiag_ino"],
        peer_inode=message.get_attr("UNIX_DIAG_PEER") or 0,
        is_file=is_file,
        datagram=message["udiag_type"] == SOCK_DGRAM,
    )


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return ""  # that is a file's

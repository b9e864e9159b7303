"""Which process is at the other end of a UNIX socket. ttrpc, which may be shipped alone, has its own function."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple


class Peer(NamedTuple):
    """The process that connected, as it was then; ids as our user namespace sees them."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end, as the kernel knows it. Source: unix(7), SO_PEERCRED."""
    layout = struct.Struct("=iII")
    return Peer(*layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)))

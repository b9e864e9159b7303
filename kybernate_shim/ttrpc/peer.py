"""Who is at the other end of a UNIX socket, as the kernel reports it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import NamedTuple


class Credentials(NamedTuple):
    """The process that connected, as it was then; ids as our user namespace sees them."""

    pid: int
    uid: int
    gid: int


def peer_of(transport: asyncio.BaseTransport) -> Credentials:
    """Return the credentials of a transport's peer, see `credentials_of`."""
    return credentials_of(transport.get_extra_info("socket"))


def credentials_of(connection: socket.socket) -> Credentials:
    """Return the credentials of a UNIX socket's peer. Source: unix(7), SO_PEERCRED."""
    layout = struct.Struct("iII")
    return Credentials(*layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)))


def same_user(peer: Credentials) -> bool:
    """Accept a peer with our own effective user and group, as containerd's shims do; root is no exception."""
    return peer.uid == os.geteuid() and peer.gid == os.getegid()

"""The process at the other end of a UNIX connection, as the kernel knows it. Source: unix(7), socket(7), pidfd_open(2).

A pid alone can lie: its process may have ended after it connected, and another one may have its number. From Linux 6.5
on, the kernel hands out a descriptor of the process itself (SO_PEERPIDFD). Before, a process counts as the one that
connected only if it was there before the connection can have been made.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Final

from kybernate.node.failure import Refused
from kybernate_shim.linux.process import start_time
from kybernate_shim.ttrpc.peer import credentials_of

SO_PEERGROUPS: Final = 59  # neither this nor the next one is in Python's socket module
SO_PEERPIDFD: Final = 77
MOST_GROUPS: Final = 256


@dataclass
class Peer:
    """A process that has connected. `close` releases its descriptor, -1 where there is none."""

    uid: int
    groups: frozenset[int]
    pid: int
    pidfd: int = -1

    def alive(self) -> bool:
        """Return whether the process itself still runs, so that what was read by its pid before was its own."""
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def peer_of(connection: socket.socket) -> Peer:
    """Return user, groups and pid of the process that has connected, without a descriptor of it. Raises OSError."""
    pid, uid, gid = credentials_of(connection)
    return Peer(uid, frozenset({gid, *_groups(connection)}), pid)


def process_of(connection: socket.socket, quiet_since: float) -> Peer:
    """Return the process that has connected with its descriptor.

    `quiet_since` is a time (CLOCK_BOOTTIME, seconds) at which the connection had not been made yet; it decides where
    the kernel has no SO_PEERPIDFD. Raises Refused and OSError.
    """
    peer = peer_of(connection)
    if peer.pid <= 0:
        raise Refused("its process is in a pid namespace that the agent cannot see")
    try:
        peer.pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        peer.pidfd = _opened_since(peer.pid, quiet_since)
    if not peer.alive():
        peer.close()
        raise Refused(f"process {peer.pid} has ended")
    return peer


def now() -> float:
    """Return the time by which the kernel notes when processes started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _opened_since(pid: int, quiet_since: float) -> int:
    """Open a process that was there at `quiet_since` already; a tick is added, because the kernel rounds down."""
    try:
        fd = os.pidfd_open(pid)
        started = (start_time(pid) + 1) / os.sysconf("SC_CLK_TCK")
    except ProcessLookupError as error:
        raise Refused(f"process {pid} has ended") from error
    if started > quiet_since:
        os.close(fd)
        raise Refused(f"process {pid} is too young to be known for certain; connect again")
    return fd


def _groups(connection: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups at the time of connect(2); none for a user who has more than Python can ask."""
    size = struct.calcsize("=I")
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MOST_GROUPS * size)
    except OSError:
        return ()
    return struct.unpack(f"={len(raw) // size}I", raw)

"""Kinds of sockets that CRIU cannot dump, each with what to do about it.

CRIU refuses them with the container frozen, by a number, or as a socket that it does not know. The kind is read from
the socket itself, without its process.
Sources: CRIU's sockets.c and sk-inet.c (can_dump_ipproto) of versions 4.1 and 4.2; socket(7), ip(7).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kybernate_shim.linux.held_files import HeldFile
from kybernate_shim.linux.libc import pidfd_getfd

SOCKET: Final = "socket:["
SO_PROTOCOL: Final = 38
SO_DOMAIN: Final = 39
ANY: Final = frozenset({socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET})
INTERNET: Final = frozenset({socket.AF_INET, socket.AF_INET6})
UDP_LITE: Final = 136
MPTCP: Final = 262
# Of AF_INET and AF_INET6, the protocols that CRIU knows of each type; of raw sockets any.
PROTOCOLS: Final[Mapping[int, frozenset[int]]] = MappingProxyType(
    {
        socket.SOCK_STREAM: frozenset({socket.IPPROTO_TCP}),
        socket.SOCK_DGRAM: frozenset({socket.IPPROTO_UDP, UDP_LITE}),
    }
)
WORDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        socket.IPPROTO_ICMP: "of ICMP (ping)", socket.IPPROTO_ICMPV6: "of ICMPv6 (ping)",
        socket.IPPROTO_SCTP: "of SCTP", MPTCP: "of MPTCP",
    }
)  # fmt: skip
FAMILIES: Final[Mapping[int, str]] = MappingProxyType(
    {
        21: "RDS", 29: "CAN", 30: "TIPC", 31: "Bluetooth", 38: "the kernel's cryptography (AF_ALG)", 40: "vsock(7)",
        41: "KCM", 43: "SMC", 44: "AF_XDP",
    }
)  # fmt: skip
REMEDIES: Final[Mapping[int, str]] = MappingProxyType(
    {
        MPTCP: "programs in Go use it since Go 1.24: set GODEBUG=multipathtcp=0 in their environment, or use TCP",
    }
)
CLOSE: Final = "close it before the checkpoint"


class SocketKind:
    """What a socket is: `family`, `type` and `protocol` as socket(2) has them.

    `unread` says that a socket of netlink(7) has messages, with which CRIU does not dump it.
    """

    def __init__(self, number: int) -> None:
        """Ask the socket that is open as `number`. Raises OSError."""
        copy = socket.socket(fileno=os.dup(number))
        with copy:
            self.family = copy.getsockopt(socket.SOL_SOCKET, SO_DOMAIN)
            self.type = copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            self.protocol = copy.getsockopt(socket.SOL_SOCKET, SO_PROTOCOL)
            self.unread = self.family == socket.AF_NETLINK and _has_messages(copy)

    @property
    def dumpable(self) -> bool:
        """Whether CRIU knows the kind."""
        if self.family in INTERNET:
            return self.type == socket.SOCK_RAW or self.protocol in PROTOCOLS.get(self.type, ())
        return self.family in ANY

    def __str__(self) -> str:
        if self.family in INTERNET:
            return WORDS.get(self.protocol, f"of the protocol {self.protocol}")
        return f"of {FAMILIES.get(self.family, f'the family {self.family}')}"


def problem_of_socket(held: HeldFile) -> str:
    """Return what is wrong with a socket and what to do, "" where nothing is. Raises OSError where it is gone."""
    copy = pidfd_getfd(held.pid, int(held.what.removeprefix("descriptor ")))
    try:
        kind = SocketKind(copy)
    finally:
        os.close(copy)
    if kind.unread:
        return "a netlink(7) socket with unread messages, which CRIU cannot dump: read them or close it"
    if kind.dumpable:
        return ""
    return f"a socket {kind}, which CRIU cannot dump: {REMEDIES.get(kind.protocol, CLOSE)}"


def _has_messages(one: socket.socket) -> bool:
    try:
        one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True

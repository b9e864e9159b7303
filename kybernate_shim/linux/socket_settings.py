"""What programs have chosen for their sockets and CRIU does not keep: options, and memberships of multicast groups.

Examples are a UDP server that reads the destination address of packets, a QUIC server that reads congestion marks, and
a member of a discovery group: after a restore, each would silently wait for what never arrives. A socket is read
through a copy of its descriptor, and the restored one is set in the same way. A program's choice is what differs from a
new socket of the same kind.
Sources: socket(7), ip(7), ipv6(7), tcp(7), udp(7), pidfd_getfd(2); the kernel's include/uapi/linux/in.h; CRIU's
sk-inet.c and sockets.c, which keep others.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kybernate_shim.linux.credentials import process_tree
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.libc import library, pidfd_getfd
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace
from kybernate_shim.linux.thread_settings import inside

SO_DOMAIN, SO_PROTOCOL = 39, 38
IP, IPV6, TCP, UDP, ALL = 0, 41, 6, 17, socket.SOL_SOCKET
FAMILIES: Final = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})
# Numbers whose values are integers, by their names: those that any program may set.
OPTIONS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "SO_OOBINLINE": (ALL, 10), "SO_TIMESTAMP": (ALL, 29), "SO_PASSSEC": (ALL, 34), "SO_TIMESTAMPNS": (ALL, 35),
        "SO_TIMESTAMPING": (ALL, 37), "SO_RXQ_OVFL": (ALL, 40), "SO_PEEK_OFF": (ALL, 42),
        "SO_SELECT_ERR_QUEUE": (ALL, 45), "SO_ZEROCOPY": (ALL, 60), "SO_PASSPIDFD": (ALL, 76),
        "IP_TOS": (IP, 1), "IP_TTL": (IP, 2), "IP_RECVOPTS": (IP, 6), "IP_RETOPTS": (IP, 7), "IP_PKTINFO": (IP, 8),
        "IP_MTU_DISCOVER": (IP, 10), "IP_RECVERR": (IP, 11), "IP_RECVTTL": (IP, 12), "IP_RECVTOS": (IP, 13),
        "IP_TRANSPARENT": (IP, 19), "IP_RECVORIGDSTADDR": (IP, 20), "IP_MINTTL": (IP, 21), "IP_CHECKSUM": (IP, 23),
        "IP_BIND_ADDRESS_NO_PORT": (IP, 24), "IP_RECVFRAGSIZE": (IP, 25), "IP_RECVERR_RFC4884": (IP, 26),
        "IP_MULTICAST_TTL": (IP, 33), "IP_MULTICAST_LOOP": (IP, 34), "IP_MULTICAST_ALL": (IP, 49),
        "IP_LOCAL_PORT_RANGE": (IP, 51),
        "TCP_SYNCNT": (TCP, 7), "TCP_LINGER2": (TCP, 8), "TCP_DEFER_ACCEPT": (TCP, 9), "TCP_WINDOW_CLAMP": (TCP, 10),
        "TCP_MAXSEG": (TCP, 2), "TCP_THIN_LINEAR_TIMEOUTS": (TCP, 16), "TCP_USER_TIMEOUT": (TCP, 18),
        "TCP_FASTOPEN": (TCP, 23), "TCP_NOTSENT_LOWAT": (TCP, 25), "TCP_SAVE_SYN": (TCP, 27), "TCP_INQ": (TCP, 36),
        "TCP_FASTOPEN_CONNECT": (TCP, 30),
        "UDP_NO_CHECK6_TX": (UDP, 101), "UDP_NO_CHECK6_RX": (UDP, 102), "UDP_SEGMENT": (UDP, 103),
        "UDP_GRO": (UDP, 104),
        "IPV6_UNICAST_HOPS": (IPV6, 16), "IPV6_MULTICAST_HOPS": (IPV6, 18), "IPV6_MULTICAST_LOOP": (IPV6, 19),
        "IPV6_MTU_DISCOVER": (IPV6, 23), "IPV6_RECVERR": (IPV6, 25), "IPV6_MULTICAST_ALL": (IPV6, 29),
        "IPV6_RECVPKTINFO": (IPV6, 49), "IPV6_RECVHOPLIMIT": (IPV6, 51), "IPV6_RECVHOPOPTS": (IPV6, 53),
        "IPV6_RECVRTHDR": (IPV6, 56), "IPV6_RECVDSTOPTS": (IPV6, 58), "IPV6_RECVPATHMTU": (IPV6, 60),
        "IPV6_DONTFRAG": (IPV6, 62), "IPV6_RECVTCLASS": (IPV6, 66), "IPV6_TCLASS": (IPV6, 67),
        "IPV6_AUTOFLOWLABEL": (IPV6, 70), "IPV6_ADDR_PREFERENCES": (IPV6, 72), "IPV6_MINHOPCOUNT": (IPV6, 73),
        "IPV6_RECVORIGDSTADDR": (IPV6, 74), "IPV6_TRANSPARENT": (IPV6, 75), "IPV6_RECVFRAGSIZE": (IPV6, 77),
        "IPV6_FREEBIND": (IPV6, 78),
    }
)  # fmt: skip
NEED_CAPABILITY: Final = frozenset({"IP_TRANSPARENT", "IPV6_TRANSPARENT"})
NETWORK_CAPABILITIES: Final = 1 << 12 | 1 << 13  # CAP_NET_ADMIN, CAP_NET_RAW: one of them is enough
OF_CONNECTIONS: Final = frozenset({"TCP_MAXSEG"})  # which differs there
TCP_CONGESTION: Final = 13
ALGORITHMS: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")  # that any program may choose
LONGEST_INTERFACE: Final = 15
MOST_SOURCES: Final = 64
MOST_SOCKETS: Final = 16384  # with something chosen, and groups of them all together: a manifest has room for no more
SECONDS: Final = 10.0  # to look at all of them; any container of a pod may join any number of groups
MCAST_JOIN_GROUP, MCAST_JOIN_SOURCE_GROUP, MCAST_MSFILTER = 42, 46, 48
INCLUDE: Final = 1  # a filter that lists the only accepted sources
ADDRESS_BYTES: Final = 128  # struct sockaddr_storage
# Groups that every host is a member of, and those of IPv6 that follow from its addresses.
OF_THE_HOST: Final = frozenset({"224.0.0.1", "ff01::1", "ff02::1"})
SOLICITED: Final = "ff02::1:ff"


@dataclass(frozen=True)
class SocketOption:
    """One of OPTIONS, with its value as an unsigned number of 32 bits."""

    name: str
    value: int


@dataclass(frozen=True)
class MulticastGroup:
    """A group that a socket is a member of, on a network interface; with `sources`, packets of those alone count."""

    address: str
    interface: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class SocketSettings:
    """What was chosen for the socket that process `pid` of the container has open as `fd`.

    `kind` is family, type and protocol, as in "2/2/17". `congestion` is an algorithm of TCP.
    """

    pid: int
    fd: int
    kind: str
    options: tuple[SocketOption, ...] = ()
    congestion: str = ""
    groups: tuple[MulticastGroup, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.options or self.congestion or self.groups)

    @property
    def title(self) -> str:
        return f"socket {self.fd} of process {self.pid}"

    def check(self) -> None:
        """Raise ValueError where this module could not have written it: its origin may be anything."""
        for option in self.options:
            if option.name not in OPTIONS or option.value >= 1 << 32:
                raise ValueError(f"{option.name[:60]!r} is not an option of a socket, or its value is too large")
        for group in self.groups:
            if not 0 < len(group.interface) <= LONGEST_INTERFACE or len(group.sources) > MOST_SOURCES:
                raise ValueError(f"{group.interface[:60]!r} is not the name of a network interface")
            for address in (group.address, *group.sources):
                ip_address(address)
        if len(self.congestion) > LONGEST_INTERFACE:
            raise ValueError(f"{self.congestion[:60]!r} is not the name of an algorithm")


def chosen(holders: Iterable[tuple[int, int]], init: int, *, connections: bool) -> tuple[SocketSettings, ...]:
    """Return what was chosen for the sockets that processes have open, each by one process and its descriptor.

    With `connections`, for connections of TCP, too, which are closed otherwise. What is closed meanwhile has chosen
    nothing. Raises OSError where `init`, whose network they are in, has ended; TimeoutError and OverflowError, with
    what to do, where they are too many.
    """
    wanted = list(holders)
    if not wanted:
        return ()
    groups, until = _groups_of(init), time.monotonic() + SECONDS

    def look() -> list[SocketSettings]:
        found: list[SocketSettings] = []
        fresh = _Fresh()
        for pid, fd in wanted:
            one = _of_socket(pid, fd, fresh, groups, connections)
            if one is not None and one.any:
                found.append(one)
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the options of {len(wanted)} sockets, in a network with members of {len(groups)} multicast"
                    f" groups, could not be read within {SECONDS:g} s: close some of them"
                )
        if len(found) > MOST_SOCKETS or sum(len(one.groups) for one in found) > MOST_SOCKETS:
            raise OverflowError(
                f"{len(found)} sockets have options or multicast groups that CRIU does not keep, more than the"
                f" {MOST_SOCKETS} that an image has room for: close some of them"
            )
        return found

    return tuple(in_namespace(Path(f"/proc/{init}/ns/net"), CLONE_NEWNET, look))


def put_back(init: int, wanted: Sequence[SocketSettings]) -> list[str]:
    """Set what was chosen for restored sockets, and return a sentence for each thing that is different here.

    Their processes should not run yet. Raises OSError where `init` has ended.
    """
    pids = {inside(f"/proc/{pid}/status")[0]: pid for pid in process_tree(init)}
    capable = _has_network_capability(init)
    algorithms = ALGORITHMS.read_text().split()

    def work() -> list[str]:
        return [f"{one.title}: {text}" for one in wanted for text in _set(one, pids.get(one.pid), capable, algorithms)]

    return in_namespace(Path(f"/proc/{init}/ns/net"), CLONE_NEWNET, work)


class _Fresh:
    """New sockets of each kind, for comparison."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], tuple[dict[str, int], bytes]] = {}

    def of(self, kind: tuple[int, int, int]) -> tuple[dict[str, int], bytes]:
        """Return options and algorithm of a new socket. Raises OSError."""
        if kind not in self._made:
            with socket.socket(*kind) as one:
                self._made[kind] = _options(one, kind, OPTIONS), _congestion(one, kind)
        return self._made[kind]


def _of_socket(
    pid: int, fd: int, fresh: _Fresh, groups: Sequence[MulticastGroup], connections: bool
) -> SocketSettings | None:
    with ExitStack() as undo:
        try:
            one = undo.enter_context(socket.socket(fileno=pidfd_getfd(pid, fd)))
            kind = _kind(one)
            connected = kind[1] == socket.SOCK_STREAM and kind[0] != socket.AF_UNIX and _is_connected(one)
            if kind[0] not in FAMILIES or (connected and not connections):
                return None
            usual, algorithm = fresh.of(kind)
            known = [name for name in usual if not (connected and name in OF_CONNECTIONS)]
            options = _options(one, kind, known)
            changed = tuple(SocketOption(name, value) for name, value in options.items() if value != usual[name])
            congestion = _congestion(one, kind)
            joined = _joined(one, kind, groups)
            process = inside(f"/proc/{pid}/status")[0]
        except OSError:
            return None
        other = congestion.decode(errors="replace") if congestion != algorithm else ""
        return SocketSettings(process, fd, "/".join(map(str, kind)), changed, other, joined)


def _kind(one: socket.socket) -> tuple[int, int, int]:
    return tuple(one.getsockopt(ALL, name) for name in (SO_DOMAIN, socket.SO_TYPE, SO_PROTOCOL))  # type: ignore[return-value]


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def _options(one: socket.socket, kind: tuple[int, int, int], names: Collection[str]) -> dict[str, int]:
    """Return the options that the socket has, as unsigned numbers."""
    levels = {ALL} | ({IP} if kind[0] != socket.AF_UNIX else set()) | ({IPV6} if kind[0] == socket.AF_INET6 else set())
    levels |= {kind[2]} & {TCP, UDP} if kind[0] != socket.AF_UNIX else set()
    found = {}
    for name in names:
        level, number = OPTIONS[name]
        if level in levels:
            with suppress(OSError):
                found[name] = one.getsockopt(level, number) & 0xFFFFFFFF
    return found


def _congestion(one: socket.socket, kind: tuple[int, int, int]) -> bytes:
    if kind[0] == socket.AF_UNIX or kind[2] != TCP:
        return b""
    return one.getsockopt(TCP, TCP_CONGESTION, 16).split(b"\0")[0]


def _groups_of(pid: int) -> list[MulticastGroup]:
    """Return the groups that anything in a process's network is a member of, the host's own left out."""
    found, interface = [], ""
    with suppress(FileNotFoundError):  # a kernel without multicast
        for line in text_of(f"/proc/{pid}/net/igmp").split("\n")[1:]:
            words = line.split()
            if line[:1].isdigit() and len(words) > 1:
                interface = words[1]
            elif len(words) > 1:
                found.append(MulticastGroup(str(IPv4Address(struct.pack("=I", int(words[0], 16)))), interface))
    with suppress(FileNotFoundError):  # without IPv6
        for line in text_of(f"/proc/{pid}/net/igmp6").split("\n"):
            if len(words := line.split()) > 2:
                found.append(MulticastGroup(str(IPv6Address(bytes.fromhex(words[2]))), words[1]))
    return [one for one in found if one.address not in OF_THE_HOST and not one.address.startswith(SOLICITED)]


def _joined(
    one: socket.socket, kind: tuple[int, int, int], groups: Sequence[MulticastGroup]
) -> tuple[MulticastGroup, ...]:
    """Return which of the groups the socket is a member of; only the kernel knows, and answers for one at a time."""
    if kind[0] == socket.AF_UNIX or kind[1] == socket.SOCK_STREAM:
        return ()
    return tuple(found for group in groups if (found := _membership(one, kind[0], group)) is not None)


def _membership(one: socket.socket, family: int, group: MulticastGroup) -> MulticastGroup | None:
    import ctypes  # here, as in libc.py

    address = ip_address(group.address)
    if family == socket.AF_INET and address.version == 6:
        return None
    try:
        index = socket.if_nametoindex(group.interface)
    except OSError:
        return None
    head = struct.pack("=I4x", index) + _sockaddr(group.address) + struct.pack("=II", 0, MOST_SOURCES)
    room = ctypes.create_string_buffer(head + bytes(MOST_SOURCES * ADDRESS_BYTES), len(head) + 64 * ADDRESS_BYTES)
    size = ctypes.c_uint32(len(room))
    level = IP if address.version == 4 else IPV6
    if library().getsockopt(one.fileno(), level, MCAST_MSFILTER, room, ctypes.byref(size)):
        return None  # EADDRNOTAVAIL: it is not a member
    mode, count = struct.unpack_from("=II", room, len(head) - 8)
    content = room.raw
    places = (content[at : at + ADDRESS_BYTES] for at in range(len(head), len(content), ADDRESS_BYTES))
    sources = [_address(place) for place, _ in zip(places, range(count), strict=False)]
    return MulticastGroup(group.address, group.interface, tuple(sources) if mode == INCLUDE else ())


def _sockaddr(address: str) -> bytes:
    parsed = ip_address(address)
    if parsed.version == 4:
        return struct.pack("=H2x4s", socket.AF_INET, parsed.packed).ljust(ADDRESS_BYTES, b"\0")
    return struct.pack("=H6x16s", socket.AF_INET6, parsed.packed).ljust(ADDRESS_BYTES, b"\0")


def _address(place: bytes) -> str:
    family = struct.unpack_from("=H", place)[0]
    return str(IPv4Address(place[4:8])) if family == socket.AF_INET else str(IPv6Address(place[8:24]))


def _has_network_capability(pid: int) -> bool:
    bounding = text_of(f"/proc/{pid}/status").partition("\nCapBnd:\t")[2].partition("\n")[0]
    return bool(int(bounding, 16) & NETWORK_CAPABILITIES)


def _set(wanted: SocketSettings, pid: int | None, capable: bool, algorithms: Collection[str]) -> Iterator[str]:
    """Set what was chosen for one socket, and yield what could not be restored."""
    with ExitStack() as undo:
        try:
            if pid is None:
                raise ProcessLookupError
            one = undo.enter_context(socket.socket(fileno=pidfd_getfd(pid, wanted.fd)))
            if "/".join(map(str, _kind(one))) != wanted.kind:
                raise FileNotFoundError
        except OSError:
            yield "was not restored"
            return
        for option in wanted.options:
            if option.name in NEED_CAPABILITY and not capable:
                yield f"its {option.name} needs a capability that the container does not have"
            else:
                yield from _tried(option.name, one, *OPTIONS[option.name], struct.pack("=I", option.value))
        if wanted.congestion:
            if wanted.congestion in algorithms:
                yield from _tried("TCP_CONGESTION", one, TCP, TCP_CONGESTION, wanted.congestion.encode())
            else:
                yield f"its algorithm {wanted.congestion!a} is not one that programs of this node may choose"
        for group in wanted.groups:
            yield from _join(one, group)


def _join(one: socket.socket, group: MulticastGroup) -> Iterator[str]:
    what = f"membership of {group.address} on {group.interface!a}"
    try:
        index = socket.if_nametoindex(group.interface)
    except OSError:
        yield f"its {what} could not be renewed (the network has no such interface)"
        return
    level = IP if ip_address(group.address).version == 4 else IPV6
    request = struct.pack("=I4x", index) + _sockaddr(group.address)
    if not group.sources:
        yield from _tried(what, one, level, MCAST_JOIN_GROUP, request)
    for source in group.sources:
        yield from _tried(what, one, level, MCAST_JOIN_SOURCE_GROUP, request + _sockaddr(source))


def _tried(what: str, one: socket.socket, level: int, number: int, value: Any) -> Iterator[str]:
    try:
        one.setsockopt(level, number, value)
    except OSError as error:
        yield f"its {what} could not be set ({error.strerror})"

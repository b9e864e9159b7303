"""The addresses of a network namespace. Sources: netdevice(7), SIOCGIFADDR; proc_net(5), if_inet6."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from typing import Final

from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace

SIOCGIFADDR: Final = 0x8915
IPV6: Final = Path("/proc/thread-self/net/if_inet6")  # each thread may be in a namespace of its own
GLOBAL: Final = "00"  # the scope of an address that is not the link's or the host's alone


def global_addresses(namespace: Path) -> tuple[str, ...]:
    """Return the addresses by which others reach a network namespace: the first of IPv4 of each interface, all of IPv6.

    Raises OSError.
    """
    return in_namespace(namespace, CLONE_NEWNET, lambda: (*_ipv4(), *_ipv6()))


def packed_address(text: str) -> bytes:
    """Return the four bytes of an address of IPv4, or the sixteen of one of IPv6. Raises ValueError."""
    try:
        return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except OSError as error:
        raise ValueError(f"{text!r} is not an address of IPv4 or IPv6") from error


def _ipv4() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, pack("16s24x", name.encode()))
            except OSError:
                continue  # it has none
            if not (found := socket.inet_ntop(socket.AF_INET, answer[20:24])).startswith("127."):
                yield found


def _ipv6() -> Iterator[str]:
    try:
        lines = lines_of(text_of(IPV6))
    except FileNotFoundError:
        return  # the kernel has no IPv6
    for line in lines:
        digits, _, _, scope, *_ = line.split()
        if scope == GLOBAL:
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))

"""Sockets that are bound to the address of their pod, on their way into another pod, which has another address.

CRIU binds a socket to the address that it had: a listener on the pod's own address, and each connected socket of UDP,
such as a resolver's, could not be bound any more. So the file in which CRIU reads of them has the new pod's addresses
in the place of the old one's, each by its rank among those of its family. Connections of TCP are not concerned: they
are closed, or kept for a network that keeps its addresses.
Source: CRIU's images/sk-inet.proto; sk-inet.c, restore_sockaddr and inet_bind, of versions 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from struct import unpack
from typing import Final

from kybernate_shim.checkpoint.criu.images import FILES, INTERNET_SOCKET, entries
from kybernate_shim.checkpoint.criu.opened import FILES_FILE, packed_entries
from kybernate_shim.linux.addresses import global_addresses, packed_address
from kybernate_shim.linux.credentials import is_nodes_namespace
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec

Numbers = tuple[int, ...]
MAPPED: Final = bytes(10) + b"\xff\xff"  # begins an address of IPv4 in a socket of IPv6


def pods_addresses(spec: Spec) -> tuple[str, ...]:
    """Return the addresses of a container's pod; none where its network is the node's or its own. Raises OSError."""
    path = spec.namespace_path("network")
    return global_addresses(Path(path)) if path and not is_nodes_namespace(path, "network") else ()


def readdressed(image: Path, before: Sequence[str], after: Sequence[str]) -> dict[str, bytes]:
    """Return CRIU's file of an image with the addresses of another pod, {} where there is nothing to change.

    Raises Damaged, and ValueError for what is not an address.
    """
    moves = _moves(before, after)
    if not moves:
        return {}
    found = list(entries(image / FILES_FILE, FILES, criu.File))
    changed = False
    for entry in found:
        if entry.type == INTERNET_SOCKET:
            for field in (entry.internet.address, entry.internet.peer):
                if (moved := moves.get(tuple(field))) is not None:
                    field[:] = moved
                    changed = True
    return {FILES_FILE: packed_entries(FILES, found)} if changed else {}


def _moves(before: Sequence[str], after: Sequence[str]) -> Mapping[Numbers, Numbers]:
    """Return CRIU's numbers of each address that another one takes the place of, with those of that one."""
    moves: dict[Numbers, Numbers] = {}
    for size in (4, 16):
        old, new = ([one for one in map(packed_address, found) if len(one) == size] for found in (before, after))
        for one, other in zip(old, new, strict=False):
            if one != other:
                moves[_numbers(one)] = _numbers(other)
                if size == 4:
                    moves[_numbers(MAPPED + one)] = _numbers(MAPPED + other)
    return moves


def _numbers(address: bytes) -> Numbers:
    return unpack(f"={len(address) // 4}I", address)

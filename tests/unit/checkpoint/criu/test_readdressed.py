"""Sockets of a pod's own address in CRIU's file of another pod."""

from __future__ import annotations

import socket
from pathlib import Path
from struct import unpack

import pytest

from kybernate_shim.checkpoint.criu.images import FILES, INTERNET_SOCKET, entries
from kybernate_shim.checkpoint.criu.opened import FILES_FILE, write_entries
from kybernate_shim.checkpoint.criu.readdressed import pods_addresses, readdressed
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec


def numbers(address: str) -> list[int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    return list(unpack(f"={len(packed) // 4}I", packed))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The file of sockets that are bound to, and connected with, these addresses."""
    ends = [("10.88.0.5", "10.88.0.1"), ("0.0.0.0", "10.88.0.5"), ("fd00::5", "::"), ("::ffff:10.88.0.5", "::")]
    sockets = [criu.InternetSocket(type=1, address=numbers(one), peer=numbers(other)) for one, other in ends]
    files = [criu.File(type=INTERNET_SOCKET, id=number, internet=one) for number, one in enumerate(sockets)]
    other = criu.File(type=1, id=9, regular=criu.RegularFile(name=b"f"))
    write_entries(tmp_path / FILES_FILE, FILES, [*files, other])
    return tmp_path


def found(content: bytes, place: Path) -> list[tuple[list[int], list[int]]]:
    place.write_bytes(content)
    files = list(entries(place, FILES, criu.File))
    assert files[-1].regular.name == b"f"
    return [(list(one.internet.address), list(one.internet.peer)) for one in files[:-1]]


def test_addresses_of_the_pod_are_those_of_the_new_one(image: Path, tmp_path: Path) -> None:
    changed = readdressed(image, ["10.88.0.5", "fd00::5"], ["10.88.7.9", "fd00::77"])
    ends = [("10.88.7.9", "10.88.0.1"), ("0.0.0.0", "10.88.7.9"), ("fd00::77", "::"), ("::ffff:10.88.7.9", "::")]
    assert found(changed[FILES_FILE], tmp_path / "new") == [(numbers(one), numbers(two)) for one, two in ends]


def test_addresses_are_exchanged_by_rank_within_their_family(image: Path, tmp_path: Path) -> None:
    changed = readdressed(image, ["fd00::5", "10.88.0.4", "10.88.0.5"], ["10.1.1.1", "10.1.1.2", "10.1.1.3"])
    assert found(changed[FILES_FILE], tmp_path / "new")[0][0] == numbers("10.1.1.2")
    assert found(changed[FILES_FILE], tmp_path / "new")[2][0] == numbers("fd00::5"), "the new pod has none of IPv6"


@pytest.mark.parametrize("after", [["10.88.0.5"], [], ["fd00::1"]])
def test_nothing_is_written_where_nothing_changes(image: Path, after: list[str]) -> None:
    assert readdressed(image, ["10.88.0.5"], after) == {}
    assert readdressed(image, ["10.88.0.99"], ["10.1.1.1"]) == {}


@pytest.mark.parametrize("path", [None, "", "/proc/self/ns/net"])
def test_network_of_the_node_or_of_a_container_alone_is_no_pods(path: str | None) -> None:
    namespaces = [] if path is None else [{"type": "network", **({"path": path} if path else {})}]
    assert pods_addresses(Spec({"linux": {"namespaces": namespaces}})) == ()

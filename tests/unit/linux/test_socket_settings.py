"""Options and groups of sockets, of this process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from kybernate_shim.linux import socket_settings
from kybernate_shim.linux.socket_settings import (
    MulticastGroup,
    SocketOption,
    SocketSettings,
    chosen,
    put_back,
)

T = TypeVar("T")
MINE = os.getpid()
GROUP = "239.1.2.3"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    def work_here(namespace: Path, kind: int, work: Callable[[], T]) -> T:
        return work()

    monkeypatch.setattr(socket_settings, "in_namespace", work_here)
    monkeypatch.setattr(socket_settings, "process_tree", lambda init: [init])


@pytest.fixture
def made() -> Iterator[Callable[..., socket.socket]]:
    with ExitStack() as undo:
        yield lambda *kind: undo.enter_context(socket.socket(*kind))


def read(*sockets: socket.socket, connections: bool = False) -> list[SocketSettings]:
    return list(chosen([(MINE, one.fileno()) for one in sockets], MINE, connections=connections))


def moved(settings: SocketSettings, other: socket.socket) -> SocketSettings:
    """Return settings as those of another socket, as if that had been restored."""
    return replace(settings, fd=other.fileno())


def test_new_sockets_have_nothing_chosen(made: Callable[..., socket.socket]) -> None:
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    assert read(*(made(family, kind) for family in families for kind in (1, 2)), made(16, 3)) == []


def test_options_of_datagrams_come_back(made: Callable[..., socket.socket]) -> None:
    one, other = made(socket.AF_INET, socket.SOCK_DGRAM), made(socket.AF_INET, socket.SOCK_DGRAM)
    for name, value in (("IP_RECVTOS", 1), ("IP_MULTICAST_TTL", 7), ("IP_MULTICAST_LOOP", 0), ("SO_TIMESTAMP", 1)):
        one.setsockopt(*socket_settings.OPTIONS[name], value)
    (found,) = read(one)
    assert {option.name: option.value for option in found.options} == {
        "IP_RECVTOS": 1, "IP_MULTICAST_TTL": 7, "IP_MULTICAST_LOOP": 0, "SO_TIMESTAMP": 1,
    }  # fmt: skip
    assert put_back(MINE, [moved(found, other)]) == []
    assert read(other) == [moved(found, other)]


def test_options_and_algorithm_of_a_listener_come_back(made: Callable[..., socket.socket]) -> None:
    one, other = made(socket.AF_INET6, socket.SOCK_STREAM), made(socket.AF_INET6, socket.SOCK_STREAM)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3333)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
    usual = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0]
    algorithm = next((name for name in socket_settings.ALGORITHMS.read_text().split() if name != usual.decode()), "")
    if algorithm:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
    one.listen()
    (found,) = read(one)
    assert {option.name for option in found.options} == {"TCP_USER_TIMEOUT", "TCP_DEFER_ACCEPT"}
    assert found.congestion == algorithm
    assert put_back(MINE, [moved(found, other)]) == []
    assert read(other) == [moved(found, other)]


def test_membership_of_a_group_is_that_of_its_socket_alone(made: Callable[..., socket.socket]) -> None:
    one, other, third = (made(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
    join = socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
    one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, join)
    source = socket.inet_aton("239.1.2.4") + socket.inet_aton("127.0.0.1") + socket.inet_aton("127.0.0.9")
    one.setsockopt(socket.IPPROTO_IP, 39, source)  # IP_ADD_SOURCE_MEMBERSHIP
    (found,) = read(one, third)
    assert set(found.groups) == {MulticastGroup(GROUP, "lo"), MulticastGroup("239.1.2.4", "lo", ("127.0.0.9",))}
    assert put_back(MINE, [moved(found, other)]) == []
    assert read(other) == [moved(found, other)]


def test_group_of_ipv6_comes_back(made: Callable[..., socket.socket]) -> None:
    one, other = made(socket.AF_INET6, socket.SOCK_DGRAM), made(socket.AF_INET6, socket.SOCK_DGRAM)
    join = socket.inet_pton(socket.AF_INET6, "ff05::1234") + struct.pack("=I", socket.if_nametoindex("lo"))
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, join)
    (found,) = read(one)
    assert found.groups == (MulticastGroup("ff05::1234", "lo"),)
    assert put_back(MINE, [moved(found, other)]) == []
    assert read(other) == [moved(found, other)]


def test_connections_are_left_out_where_they_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3333)
        assert read(client) == []
        (found,) = read(client, connections=True)
        assert SocketOption("TCP_USER_TIMEOUT", 3333) in found.options


def test_what_cannot_be_set_is_a_difference(made: Callable[..., socket.socket]) -> None:
    one = made(socket.AF_INET, socket.SOCK_DGRAM)
    kind = "2/2/17"
    wanted = [
        SocketSettings(MINE, one.fileno(), "2/1/6", (SocketOption("IP_TTL", 9),)),
        SocketSettings(MINE + 1_000_000, one.fileno(), kind, (SocketOption("IP_TTL", 9),)),
        SocketSettings(MINE, one.fileno(), kind, (SocketOption("TCP_USER_TIMEOUT", 9),)),
        SocketSettings(MINE, one.fileno(), kind, groups=(MulticastGroup(GROUP, "none0"),)),
        SocketSettings(MINE, one.fileno(), kind, congestion="none"),
    ]
    said = put_back(MINE, wanted)
    ends = ["was not restored"] * 2 + ["its TCP_USER_TIMEOUT could not be set", "no such interface", "may choose"]
    assert [end in text for end, text in zip(ends, said, strict=True)] == [True] * 5, said


def test_transparent_sockets_need_their_capability(
    made: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_settings, "_has_network_capability", lambda pid: False)
    one = made(socket.AF_INET, socket.SOCK_STREAM)
    wanted = SocketSettings(MINE, one.fileno(), "2/1/6", (SocketOption("IP_TRANSPARENT", 1),))
    assert "needs a capability" in put_back(MINE, [wanted])[0]
    assert one.getsockopt(socket.IPPROTO_IP, 19) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        SocketSettings(1, 3, "2/2/17", (SocketOption("SO_MARK", 1),)),
        SocketSettings(1, 3, "2/2/17", (SocketOption("IP_TTL", 1 << 32),)),
        SocketSettings(1, 3, "2/2/17", groups=(MulticastGroup("no address", "lo"),)),
        SocketSettings(1, 3, "2/2/17", groups=(MulticastGroup(GROUP, "x" * 16),)),
        SocketSettings(1, 3, "2/2/17", groups=(MulticastGroup(GROUP, "lo", ("?",)),)),
        SocketSettings(1, 3, "2/1/6", congestion="x" * 16),
    ],
    ids=lambda one: f"{one.options or one.groups or one.congestion}"[:60],
)
def test_settings_of_a_foreign_manifest_are_checked(wrong: SocketSettings) -> None:
    with pytest.raises(ValueError, match=r".+"):
        wrong.check()


def test_sockets_and_groups_without_number_are_refused(
    made: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = made(socket.AF_INET, socket.SOCK_DGRAM), made(socket.AF_INET, socket.SOCK_DGRAM)
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_IP, 13, 1)
    monkeypatch.setattr(socket_settings, "MOST_SOCKETS", 1)
    with pytest.raises(OverflowError, match="2 sockets have options or multicast groups"):
        read(one, other)
    monkeypatch.setattr(socket_settings, "SECONDS", -1.0)
    with pytest.raises(TimeoutError, match="the options of 2 sockets, in a network with members of"):
        read(one, other)

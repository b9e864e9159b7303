"""What is said of a container's sockets before they are dumped."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kybernate_shim.checkpoint import sockets
from kybernate_shim.checkpoint.image.manifest import TcpPolicy
from kybernate_shim.checkpoint.sockets import (
    Socket,
    external_unix,
    needs_network_lock,
    of_other_users,
    what_happens,
)
from kybernate_shim.linux import credentials

CONNECTION = Socket("tcp", "established", "10.0.0.2:80", "10.0.0.9:5555", 1)
LISTENING = Socket("tcp", "listening", "0.0.0.0:80", "", 2)
PAIR = (Socket("unix", "established", "/run/a", "", 3, 4), Socket("unix", "established", "", "", 4, 3))


@pytest.mark.parametrize("local", ["0.0.0.0:80", "127.0.0.1:80", "[::]:80", "[::1]:80", "127.1.2.3:1"])
def test_listening_anywhere_or_on_loopback_goes_on(local: str) -> None:
    assert what_happens([Socket("tcp", "listening", local)], "close") == [f"listening on {local} will continue"]


def test_listening_on_an_address_of_the_pod_is_in_doubt() -> None:
    lines = what_happens([Socket("tcp", "listening", "10.0.0.2:80")], "close")
    assert lines == ["listening on 10.0.0.2:80 will continue only where the network has that address"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("close", "1 TCP connections will be closed: 10.0.0.2:80→10.0.0.9:5555"),
        ("established", "1 TCP connections will continue if the address stays the same: 10.0.0.2:80→10.0.0.9:5555"),
    ],
)
def test_connections_follow_the_policy(policy: TcpPolicy, words: str) -> None:
    assert what_happens([CONNECTION, *PAIR], policy) == [words]


def test_of_many_connections_some_are_shown() -> None:
    assert what_happens([CONNECTION] * 8, "close")[0].endswith("10.0.0.9:5555 and 3 more")


def test_unix_sockets_to_the_outside_are_named() -> None:
    assert external_unix(PAIR) == []
    assert what_happens([PAIR[0]], "close") == [
        "1 UNIX sockets are connected to processes outside the container: /run/a"
    ]


def test_packets_are_held_back_only_for_connections_that_go_on() -> None:
    assert needs_network_lock([CONNECTION], "established")
    assert not needs_network_lock([CONNECTION], "close")
    assert not needs_network_lock([LISTENING, *PAIR], "established")


def test_sockets_of_other_users_than_root_will_name_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_user_of", lambda pid: 1000 if pid == 7 else 0)
    near, far = (replace(one, holder=(7, 3)) for one in PAIR)
    listening = Socket("unix", "listening", "/run/b", holder=(7, 5))
    others = (replace(near, datagram=True), replace(near, state="unconnected"), replace(near, holder=(8, 3)))
    found = of_other_users([near, far, listening, *others, replace(LISTENING, holder=(7, 6))])
    assert found == [near, far, listening]
    (line,) = what_happens([near, far], "close", found)
    assert line == "3 UNIX sockets will name root as their peers' user (SO_PEERCRED): /run/a, unnamed, /run/b"


@pytest.mark.parametrize(("user", "inside"), [(200_000, 0), (200_007, 7), (0, 0), (1000, 1000)])
def test_user_is_the_one_inside_of_the_container(monkeypatch: pytest.MonkeyPatch, user: int, inside: int) -> None:
    """Root of a pod with users of its own is another user of the node."""
    status = f"Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\nGid:\t0\n"
    monkeypatch.setattr(credentials, "_read", lambda path: status)
    monkeypatch.setattr(credentials, "_ranges", lambda path: [(0, 200_000, 65536)])
    assert sockets._user_of(os.getpid()) == inside


def test_listening_on_an_address_of_the_pod_goes_on_in_the_next_one() -> None:
    lines = what_happens([Socket("tcp", "listening", "10.0.0.2:80")], "close", (), ("10.0.0.2",))
    assert lines == ["listening on 10.0.0.2:80 will continue on the address of the pod that it is restored into"]

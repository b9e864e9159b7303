"""The agent's own sockets: modes, what a killed agent has left, and what is in the way."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.agent import sockets
from kybernate.agent.sockets import admit_readers, for_containers, for_readers, on_tcp, passed, private_directory
from kybernate.node.failure import Failure


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kyb-") as name:
        yield Path(name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("group", "file", "directory"), [(os.getgid(), 0o660, 0o710), (None, 0o600, 0o700)])
def test_socket_for_readers_is_closed_to_all_others(place: Path, group: int | None, file: int, directory: int) -> None:
    path = place / "run" / "agent.sock"
    with for_readers(path, group):
        admit_readers(path, group)
        assert (mode(path), mode(path.parent)) == (file, directory)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    with for_readers(path, group):  # over the one that was left
        assert mode(path) == file


def test_directory_that_is_open_on_purpose_stays_as_it_is(place: Path) -> None:
    place.chmod(0o755)
    with for_readers(place / "agent.sock", os.getgid()):
        admit_readers(place / "agent.sock", os.getgid())
        assert mode(place) == 0o755


def test_socket_for_containers_is_open_in_a_directory_of_its_own(place: Path) -> None:
    path = place / "run" / "self" / "agent.sock"
    with for_containers(path):
        assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o666, 0o755, 0o700)


def test_link_in_the_place_of_the_new_socket_is_not_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with the directory as a volume puts it there."""
    victim, path = place / "victim", place / "agent.sock"
    victim.touch(mode=0o600)

    class Exchanged(socket.socket):
        def bind(self, address: object) -> None:
            super().bind(address)  # type: ignore[arg-type]
            path.unlink()
            path.symlink_to(victim)

    monkeypatch.setattr(sockets.socket, "socket", Exchanged)
    with for_containers(path):
        assert mode(victim) == 0o600


def test_what_is_no_socket_is_not_removed(place: Path) -> None:
    (place / "agent.sock").write_text("important")
    with pytest.raises(Failure, match="Address already in use"):
        for_readers(place / "agent.sock", None)
    assert (place / "agent.sock").read_text() == "important"


def test_private_directory_is_emptied_and_is_no_link(place: Path) -> None:
    private = private_directory(place / "agent.sock")
    assert mode(private) == 0o700
    (private / "left").touch()
    assert not list(private_directory(place / "agent.sock").iterdir())
    private.chmod(0o750)
    with pytest.raises(Failure, match="not a directory that only root can use"):
        private_directory(place / "agent.sock")
    private.rmdir()
    private.symlink_to(place)
    with pytest.raises(Failure, match="private"):
        private_directory(place / "agent.sock")


def test_address_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Failure, match="cannot listen on"):
        on_tcp(f"127.0.0.1:{taken.getsockname()[1]}")
    with on_tcp("[::1]:0") if socket.has_ipv6 else on_tcp("127.0.0.1:0") as listener:
        assert listener.getsockname()[1]


def test_socket_of_systemd_is_found_by_its_name_or_is_the_only_one() -> None:
    with socket.socket() as one, socket.socket() as two:
        assert passed("agent", {"agent": one, "self": two}) is one
        assert passed("self", {"agent": one, "self": two}) is two
        assert passed("agent", {"kybernate-agent.socket": one}) is one
        assert passed("self", {"kybernate-agent.socket": one}) is None
        assert passed("agent", {}) is None


def test_group_that_the_node_has_not_is_none() -> None:
    assert sockets.group_of("") is None
    assert sockets.group_of("no-such-group-here") is None
    assert sockets.group_of("root") == 0

"""Who is at the other end of a UNIX socket: real processes, with and without the kernel's descriptor of them."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.access import peers
from kybernate.agent.access.peers import now, peer_of, process_of
from kybernate.node.failure import Refused
from tests.unit.agent.access.conftest import unix_listener

CONNECTS = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(flush=True); input()"
# Connects, hands the connection to a child that outlives it, and ends.
HANDS_ON = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
if os.fork() == 0:
    print(flush=True)
    input()
"""


@contextmanager
def connected(place: Path, program: str) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes], float]]:
    listener = unix_listener(place / "s")
    quiet = now()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(place / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    connection, _ = listener.accept()
    try:
        yield connection, process, quiet
    finally:
        connection.close()
        listener.close()
        process.communicate(b"\n", timeout=10)


@pytest.fixture
def without_peerpidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 6.5: the option is one that it does not know."""
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)


def test_peer_is_the_process_that_has_connected(place: Path) -> None:
    with connected(place, CONNECTS) as (connection, process, quiet):
        peer = process_of(connection, quiet)
        assert (peer.pid, peer.uid) == (process.pid, os.getuid())
        assert os.getgid() in peer.groups
        assert set(os.getgroups()) <= peer.groups
        assert peer.alive()
        process.kill()
        process.wait(10)
        assert not peer.alive()
        peer.close()


def test_process_that_handed_its_connection_on_and_ended_is_refused(place: Path) -> None:
    with connected(place, HANDS_ON) as (connection, process, quiet):
        process.wait(10)
        with pytest.raises(Refused, match="ended"):
            process_of(connection, quiet)
        assert peer_of(connection).pid == process.pid


def test_old_kernel_process_that_was_there_before_is_known(place: Path, without_peerpidfd: None) -> None:
    with connected(place, CONNECTS) as (connection, process, _):
        peer = process_of(connection, now() + 0.02)
        assert peer.pid == process.pid
        assert peer.alive()
        peer.close()


def test_old_kernel_process_that_is_too_young_is_refused(place: Path, without_peerpidfd: None) -> None:
    with connected(place, CONNECTS) as (connection, _, quiet), pytest.raises(Refused, match="too young"):
        process_of(connection, quiet)


def test_old_kernel_process_that_ended_is_refused(place: Path, without_peerpidfd: None) -> None:
    with connected(place, HANDS_ON) as (connection, process, _):
        process.wait(10)
        with pytest.raises(Refused, match=r"has ended|too young|cannot see"):
            process_of(connection, now() + 1)


def test_no_descriptor_is_lost(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with connected(place, HANDS_ON) as (connection, process, quiet):
        process.wait(10)
        for _ in range(5):
            with pytest.raises(Refused, match=r"has ended|too young|cannot see"):
                process_of(connection, quiet)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_process_that_cannot_be_seen_is_refused() -> None:
    class Invisible:
        def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
            return struct.pack("=iII", 0, 0, 0) if option == socket.SO_PEERCRED else b""

    with pytest.raises(Refused, match="pid namespace"):
        process_of(Invisible(), now())  # type: ignore[arg-type]

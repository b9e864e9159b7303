"""The kernel's list of a container's sockets, from a network namespace of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.sockets import Socket, container_sockets, external_unix, list_sockets
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace

pytestmark = pytest.mark.root

# Opens sockets of every kind in a new network namespace, says so, and waits to be told to end.
PROGRAM = """
import json, os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listening = socket.create_server(("127.0.0.1", 8080))
anywhere = socket.create_server(("::", 8081), family=socket.AF_INET6)
client = socket.create_connection(("127.0.0.1", 8080))
server, _ = listening.accept()
named = socket.socket(socket.AF_UNIX); named.bind(sys.argv[1]); named.listen()
abstract = socket.socket(socket.AF_UNIX); abstract.bind(chr(0) + "kybernate-test"); abstract.listen()
a, b = socket.socketpair()
outside = socket.socket(socket.AF_UNIX); outside.connect(sys.argv[2])
print(json.dumps(client.getsockname()[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Yield the pid of the program, and the port of its connection."""
    with socket.socket(socket.AF_UNIX) as outside:
        outside.bind(str(tmp_path / "outside"))
        outside.listen()
        process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", PROGRAM, str(tmp_path / "named"), str(tmp_path / "outside")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout
        line = process.stdout.readline()
        # A connection that no process has accepted has no other end yet.
        connection, _ = outside.accept()
        assert line, "the program with the sockets did not start"
        yield process.pid, json.loads(line)
        process.communicate()
        connection.close()


def plain(sockets: list[Socket]) -> set[tuple[str, str, str, str]]:
    return {(socket.family, socket.state, socket.local, socket.peer) for socket in sockets}


def test_every_socket_of_the_container_is_listed(program: tuple[int, int], tmp_path: Path) -> None:
    pid, port = program
    found = container_sockets([pid])
    assert plain(found) == {
        ("tcp", "listening", "127.0.0.1:8080", ""),
        ("tcp", "listening", "[::]:8081", ""),
        ("tcp", "established", f"127.0.0.1:{port}", "127.0.0.1:8080"),
        ("tcp", "established", "127.0.0.1:8080", f"127.0.0.1:{port}"),
        ("unix", "listening", str(tmp_path / "named"), ""),
        ("unix", "listening", "@kybernate-test", ""),
        ("unix", "established", "", ""),
    }
    assert len(external_unix(found)) == 1, f"only the connection to the test is external: {found}"


def test_sockets_of_others_in_the_namespace_are_left_out(program: tuple[int, int]) -> None:
    pid, _ = program
    script = "echo ready; exec sleep 60"
    other = subprocess.Popen(["nsenter", "--net", f"--target={pid}", "sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert other.stdout
        assert other.stdout.readline() == b"ready\n"
        assert in_namespace(Path(f"/proc/{other.pid}/ns/net"), CLONE_NEWNET, list_sockets) != []
        assert container_sockets([other.pid]) == []
    finally:
        other.kill()
        other.communicate()


def test_a_thread_that_joined_a_namespace_leaves_the_others_alone(program: tuple[int, int]) -> None:
    before = Path("/proc/self/ns/net").stat().st_ino
    inside = in_namespace(
        Path(f"/proc/{program[0]}/ns/net"), CLONE_NEWNET, lambda: Path("/proc/thread-self/ns/net").stat().st_ino
    )
    assert inside != before
    assert Path("/proc/thread-self/ns/net").stat().st_ino == before


def test_a_container_that_is_gone_has_no_sockets_and_no_namespace() -> None:
    never = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1  # a pid that did exist may come again
    assert container_sockets([never]) == []
    with pytest.raises(FileNotFoundError, match=str(never)):
        in_namespace(Path(f"/proc/{never}/ns/net"), CLONE_NEWNET, list_sockets)

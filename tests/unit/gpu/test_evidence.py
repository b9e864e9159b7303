"""Evidence is read from real processes: files that they map, sockets between them, what was in their environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.sockets import container_sockets
from kybernate_shim.gpu import evidence
from kybernate_shim.gpu.evidence import holds_driver, look

TALKS = """
import mmap, os, socket, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
library = mmap.mmap(os.open(sys.argv[2], os.O_RDONLY), 4096, prot=mmap.PROT_READ)
if sys.argv[3] == "0":
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
else:
    peer = socket.create_connection(("127.0.0.1", int(sys.argv[3])))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[int]]:
    """Two processes with a TCP connection, a shared segment and a library that has NCCL's name."""
    segment, library = Path(f"/dev/shm/nccl-test-{os.getpid()}"), tmp_path / "libnccl.so.2"
    library.write_bytes(bytes(4096))
    environment = {**os.environ, "NCCL_P2P_DISABLE": "1", "SECRET": "x"}
    started: list[subprocess.Popen[str]] = []
    port = "0"
    for _ in range(2):
        argv = [sys.executable, "-c", TALKS, str(segment), str(library), port]
        started.append(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        if port == "0":
            assert started[0].stdout is not None
            port = started[0].stdout.readline().strip()
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    yield [process.pid for process in started]
    for process in started:
        process.communicate("")
    segment.unlink()


def test_connected_processes_are_each_others_peers(pair: list[int]) -> None:
    one, two = look(pair)
    assert (one.peers, two.peers) == ({two.pid}, {one.pid})
    assert one.maps("libnccl").endswith("/libnccl.so.2")
    assert [path for path in one.segments if "nccl-test" in path]
    assert one.environment["NCCL_P2P_DISABLE"] == "1"
    assert "SECRET" not in one.environment


def test_process_that_is_gone_leaves_no_evidence() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert look([child.pid]) == []
    assert not holds_driver(child.pid)
    assert not holds_driver(os.getpid())


# As an H100 with driver 580.159.04 shows them: every process has the first, the second came with cuMemAllocManaged.
POOL = "204a00000-204c00000 rw-s 204a00000 00:06 144                             /dev/nvidia-uvm\n"
MANAGED = "7f6d2c000000-7f6d30000000 rw-s 7f6d2c000000 00:06 144                    /dev/nvidia-uvm\n"
CONTROL = "200200000-203a00000 rw-s 00000000 00:06 143                             /dev/nvidiactl\n"


@pytest.mark.parametrize(("maps", "size"), [(POOL + CONTROL, 0), (POOL + CONTROL + MANAGED, 64 << 20)])
def test_managed_memory_is_told_from_the_drivers_own_pool(maps: str, size: int) -> None:
    assert evidence._managed_bytes(maps) == size


def test_mapped_unified_memory_is_seen_in_a_process(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    device.write_bytes(bytes(3 << 20))
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); input()"
    argv = [sys.executable, "-c", code, str(device)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (found,) = look([process.pid])
        assert found.managed_bytes == 3 << 20
        process.communicate("\n")


NAMED = """
import ctypes, mmap, os, socket, sys
ctypes.CDLL(None).prctl(15, b"\\xfe name")
path = os.path.join(os.fsencode(sys.argv[1]), b"libnccl.so\\xff\\xc2\\x85")
open(path, "wb").write(bytes(4096))
kept = mmap.mmap(os.open(path, os.O_RDONLY), 4096, prot=mmap.PROT_READ)
one = socket.socket(socket.AF_UNIX); one.bind(b"\\0bad \\xff name"); one.listen()
other = socket.socket(socket.AF_UNIX)
other.bind(os.path.join(os.fsencode(sys.argv[1]), b"socket\\xff")); other.listen()
print("ready", flush=True)
sys.stdin.read()
"""


def test_names_that_are_no_text_are_seen_of_it_and_of_others_in_its_network(tmp_path: Path) -> None:
    environment = {**os.environb, b"NAME\xff": b"\xfe", b"NCCL_P2P_DISABLE": b"1"}
    argv = [sys.executable, "-c", NAMED, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        seen, own = look([process.pid, os.getpid()])
        bound = {one.local for one in container_sockets([process.pid])}
        assert not holds_driver(process.pid)
        process.communicate(b"")
    assert own.pid == os.getpid()  # it shares the network namespace alone
    assert os.fsencode(seen.maps("libnccl")).endswith(b"libnccl.so\xff\xc2\x85")
    assert seen.environment["NCCL_P2P_DISABLE"] == "1"
    assert seen.name == "\\udcfe name"
    assert {os.fsencode(name) for name in bound} == {b"@bad \xff name", os.fsencode(tmp_path) + b"/socket\xff"}


@pytest.mark.parametrize("name", ["\0nvidia-mps/control", "{directory}/nvidia-mps"])
def test_socket_is_of_those_that_have_it_open_or_are_connected_to_it(name: str, tmp_path: Path) -> None:
    """All processes of a node with `hostNetwork` see each other's names, and may take any."""
    address = name.format(directory=tmp_path)
    shown = address.replace("\0", "@")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(address)
        server.listen()
        client.connect(address)
        accepted, _ = server.accept()
        argv = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"]
        neighbour = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        user = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[client.fileno()])
        try:
            for process in (neighbour, user):
                assert process.stdout is not None
                assert process.stdout.readline() == b"1\n"
            seen = {one.pid: one.sockets for one in look([os.getpid(), neighbour.pid, user.pid])}
            assert seen == {os.getpid(): {shown}, neighbour.pid: frozenset(), user.pid: {shown}}
        finally:
            accepted.close()
            neighbour.communicate()
            user.communicate()

"""Evidence is read from real processes: files that they map, sockets between them, what was in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu.usage import inner_pid, own_memory
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


NAMED_IN_ANY_BYTES = """
import ctypes, mmap, os, socket, sys
place = os.fsencode(sys.argv[1]) + b"/lib\\xe3\\x28.so"
file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
listener = socket.socket(socket.AF_UNIX)
listener.bind(b"\\0kybernate-test-\\xe3\\x28")
ctypes.CDLL(None).prctl(15, b"t\\xe3\\x28", 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_names_that_are_no_text_hide_nothing(tmp_path: Path) -> None:
    """Of a file, an abstract socket and a thread, which any program may have."""
    argv = [sys.executable, "-c", NAMED_IN_ANY_BYTES, tmp_path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        (found,) = look([program.pid])
        assert found.name.startswith("t")
        assert any("kybernate-test-" in name for name in found.sockets)
        assert not holds_driver(program.pid)
        assert inner_pid(program.pid) == program.pid
        assert own_memory([program.pid])[program.pid]
        program.communicate()

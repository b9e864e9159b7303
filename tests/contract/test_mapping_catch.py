"""Calls that threads of other processes make themselves, seen and changed under way.

Nobody here may wait for a program that is watched: the stops that its tracer waits for come to the whole process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kybernate_shim.cuda.vram.prefault import prefaulting
from kybernate_shim.linux.mapping_catch import DESCRIPTOR, FLAGS, OFFSET, Asked, Call, MappingCatch, Plan
from kybernate_shim.linux.memory import read_maps
from kybernate_shim.linux.ptrace import MAP_SHARED, Held
from tests.fakes.actor import eventually
from tests.fakes.memory_process import MemoryProcess

pytestmark = pytest.mark.root

MIB = 1 << 20
SOURCE = Path(__file__).parents[1] / "fakes" / "maps_once.c"
SECONDS = 20.0
SIZE = 4 * MIB


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maps-once") / "maps_once"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("offered")
    os.ftruncate(fd, SIZE)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def running(*argv: str | Path, fd: int = -1) -> Iterator[subprocess.Popen[str]]:
    passed = [fd] if fd >= 0 else []
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=passed) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass
class OfFile:
    """The plan that large memory is a shared mapping of a file; -1 for none."""

    fd: int = -1
    made_at: list[int] = field(default_factory=list)

    def change(self, asked: Asked) -> Mapping[int, int] | None:
        if self.fd < 0 or not asked.private_anonymous or asked.size < 2 * MIB:
            return None
        return {FLAGS: MAP_SHARED, DESCRIPTOR: self.fd, OFFSET: 0}

    def made(self, start: int, call: Call) -> None:
        self.made_at.append(start)


def catch(process: subprocess.Popen[str] | MemoryProcess, plan: Plan) -> MappingCatch:
    return MappingCatch([process.pid], plan, seconds=SECONDS)


def say(process: subprocess.Popen[str], line: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tracer_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("TracerPid:")[2].split()[0])


def test_mapping_is_made_of_the_file_and_the_caller_keeps_its_registers(program: Path, file: int) -> None:
    plan = OfFile(file)
    with running(program, fd=file) as process:
        watched = catch(process, plan)
        watched.start()
        say(process, SIZE)
        start = int(answer(process))
        watched.end(SECONDS)
        assert tracer_of(process.pid) == 0
        (region,) = [one for one in read_maps(process.pid) if one.start == start]
    status = os.fstat(file)
    assert (region.perms, region.size) == ("rw-s", SIZE)
    assert (region.device, region.inode) == (status.st_dev, status.st_ino)
    assert plan.made_at == [start]
    assert os.pread(file, SIZE, 0) == b"x" * SIZE


@pytest.mark.parametrize(("size", "offered"), [(MIB, True), (SIZE, False)], ids=["small", "declined"])
def test_what_is_not_wanted_is_left_alone(program: Path, file: int, size: int, offered: bool) -> None:
    with running(program, fd=file) as process:
        watched = catch(process, OfFile(file if offered else -1))
        watched.start()
        say(process, size)
        start = int(answer(process))
        watched.end(SECONDS)
        assert tracer_of(process.pid) == 0
        assert any(one.private_anonymous and one.start <= start < one.end for one in read_maps(process.pid))
    assert os.pread(file, SIZE, 0) == bytes(SIZE)


def test_thread_deep_in_the_kernel_is_let_go_of_when_it_comes_out(tmp_path: Path) -> None:
    """One that waits for its child as vfork does cannot be stopped; the child waits for the other end of a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    deep = (
        "import os, sys; sys.stdin.readline();"
        f"os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, 0, 0)]);"
        "print('out', flush=True); sys.stdin.readline()"
    )
    with running(sys.executable, "-ES", "-c", deep) as process:
        watched = catch(process, OfFile())
        watched.start()
        say(process, "")
        assert eventually(lambda: process_state(process.pid) == "D")
        watched.end(0.1)
        assert tracer_of(process.pid) != 0
        os.close(os.open(fifo, os.O_WRONLY))
        assert answer(process) == "out"
        assert eventually(lambda: tracer_of(process.pid) == 0)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_watched_thread_stays_under_its_seccomp_filter() -> None:
    """What a thread does by itself it may do no more than before; the filter here is the kernel's strict one."""
    strict = (
        "import ctypes, os, sys; sys.stdin.readline(); ctypes.CDLL(None).prctl(22, 1);"
        "os.write(1, b'filtered'); os.getppid(); os.write(1, b', not any more')"
    )
    with running(sys.executable, "-ES", "-c", strict) as process:
        watched = catch(process, OfFile())
        watched.start()
        say(process, "")
        assert process.stdout is not None
        assert process.stdout.read() == "filtered"
        watched.end(SECONDS)


def test_thread_that_ends_is_no_failure(program: Path) -> None:
    with running(program) as process:
        watched = catch(process, OfFile())
        watched.start()
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: not Path(f"/proc/{process.pid}").exists())  # its tracer has seen it off
        watched.end(SECONDS)


def test_memory_that_is_asked_for_with_its_pages_is_made_by_us_of_huge_ones() -> None:
    with MemoryProcess() as program:
        watched = prefaulting(program.pid, [program.pid], 3, seconds=SECONDS)
        assert watched is not None
        region = program.map_populated("v", 17 * MIB)
        watched.end()
        assert tracer_of(program.pid) == 0
        assert region.private_anonymous
        assert program.resident_kib(region, "AnonHugePages") >= 14 * 1024
        program.ask("maps['v'].write(b'x' * len(maps['v']))")
        assert program.resident_kib(region) == 17 * 1024


def test_memory_that_is_asked_for_without_pages_gets_none() -> None:
    with MemoryProcess() as program:
        watched = prefaulting(program.pid, [program.pid], 2, seconds=SECONDS)
        assert watched is not None
        region = program.region("a", 8 * MIB)
        program.map_populated("v", 4 * MIB)  # of which the watch would wait for the end
        watched.end()
        assert program.resident_kib(region) == 0


def test_process_that_is_traced_already_is_left_alone() -> None:
    with MemoryProcess() as program, Held(program.pid):
        assert prefaulting(program.pid, [program.pid], 2, seconds=SECONDS) is None

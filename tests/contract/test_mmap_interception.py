"""Calls that threads of other processes make themselves, seen and changed in progress.

Nothing here may wait for a program that is watched: the stops that its tracer waits for come to the whole process.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kybernate_shim.linux.process_memory import read_maps
from kybernate_shim.linux.ptrace.followed import FollowedTracee
from kybernate_shim.linux.ptrace.mmap_interception import (
    DESCRIPTOR,
    FLAGS,
    OFFSET,
    Asked,
    Call,
    MappingPlan,
    MmapInterception,
)
from kybernate_shim.linux.ptrace.seized import MAP_SHARED, SeizedProcess, own_abi
from kybernate_shim.linux.ptrace.tracee import TargetEnded
from kybernate_shim.vram_mover.prefault import prefaulting
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


def catch(process: subprocess.Popen[str] | MemoryProcess, plan: MappingPlan) -> MmapInterception:
    return MmapInterception([process.pid], plan, seconds=SECONDS)


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
        parent = psutil.Process(process.pid)
        # Without a child, it only waits for a page of a file.
        assert eventually(lambda: bool(parent.children()) and process_state(process.pid) == "D")
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
    with MemoryProcess() as program, SeizedProcess(program.pid):
        assert prefaulting(program.pid, [program.pid], 2, seconds=SECONDS) is None


@dataclass
class Noting:
    """The plan that leaves everything alone, and notes what it was asked."""

    asked: list[Asked] = field(default_factory=list)

    def change(self, asked: Asked) -> Mapping[int, int] | None:
        self.asked.append(asked)
        return None

    def made(self, start: int, call: Call) -> None:
        raise AssertionError("nothing was changed")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="arm64 threads of 64 bits have no calls of another kind")
def test_call_of_32_bits_with_the_same_number_is_no_mapping() -> None:
    """It is link(2), with arguments that look like those of a large mapping."""
    with MemoryProcess() as program:
        program.ask(
            "globals().update(code=mmap.mmap(-1, 4096, prot=7), link=lambda: "
            "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())"
        )
        program.ask(f"code.write({LINK_BY_INT_80!r})")
        plan = Noting()
        watched = catch(program, plan)
        watched.start()
        assert program.ask("link()") == -errno.EFAULT
        program.region("a", SIZE)
        watched.end(SECONDS)
        assert program.ask("1 + 1") == 2
    assert [one.size for one in plan.asked if one.private_anonymous and one.size >= SIZE] == [SIZE]


LINK_BY_INT_80 = bytes.fromhex(
    "53 55"  # push rbx, rbp
    "b809000000 31db b900004000 ba03000000 be22000000 bfffffffff 31ed"  # eax = 9, the rest as for mmap
    "cd80 5d 5b c3"  # int 0x80, pop rbp, rbx, ret
)


def test_thread_that_has_left_the_call_is_not_changed(program: Path) -> None:
    """As where another program has got its thread id meanwhile, by execve(2)."""
    failures = []

    def follow(pid: int) -> None:
        tracee = FollowedTracee(pid, own_abi(), time.monotonic() + SECONDS)
        tracee.go_to_call()
        while not tracee.at_call():
            time.sleep(0.001)
        tracee.entered()
        for _ in range(2):  # to the exit of its read, and to the entry of another call
            tracee.go_to_call()
            say_once()
            while not tracee.at_call():
                time.sleep(0.001)
            try:
                tracee.change_arguments({0: 77})
            except TargetEnded as error:
                failures.append(error)
        tracee.leave()

    with running(program) as process:
        sent = []

        def say_once() -> None:
            if not sent:
                sent.append(say(process, SIZE))

        with ThreadPoolExecutor(1) as tracer:
            tracer.submit(follow, process.pid).result()
        assert int(answer(process)) > 0
    assert len(failures) == 2

"""What a process gives up of devices, and who is left alone. /dev/zero stands for NVIDIA's devices."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.gpu.inheritors import identity
from kybernate_shim.linux.nvidia_devices import look
from kybernate_shim.linux.process_memory import read_maps
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed, TargetEnded
from kybernate_shim.vram_mover.release import MOST_DESCRIPTORS, Inheritor, release

pytestmark = pytest.mark.root
WANTED = frozenset({(stat.S_IFCHR, 1)})
CLONE_FILES = 0x400
CLONE = {"x86_64": 56, "aarch64": 220}
SECONDS = 5.0


def pauses() -> None:
    while True:
        signal.pause()


@contextmanager
def forked(flags: int = 0, descriptors: int = 1) -> Iterator[Inheritor]:
    """A child that maps /dev/zero and has it open, as proven; with `flags` of clone(2)."""
    device = os.open("/dev/zero", os.O_RDONLY)
    mapped = mmap.mmap(device, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    ready, go = os.pipe()
    pid = ctypes.CDLL(None).syscall(CLONE[os.uname().machine], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        for _ in range(descriptors - 1):
            os.dup(device)
        os.write(go, b"!")
        pauses()
    os.read(ready, 1)
    try:
        who = identity(pid)
        assert who is not None
        yield Inheritor(pid, who.started, look(pid, WANTED).descriptors)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        mapped.close()
        for fd in (device, ready, go):
            os.close(fd)


def test_numbers_and_addresses_stay_taken() -> None:
    with forked() as inheritor:
        (mapping, *_), descriptors = look(inheritor.pid, WANTED).mappings, inheritor.inherited
        given = release(inheritor, [], WANTED, seconds=SECONDS)
        assert (given.descriptors, given.kept_bytes) == (len(descriptors), 0)
        assert given.bytes >= mmap.PAGESIZE
        assert not look(inheritor.pid, WANTED)
        for number in descriptors:
            assert str(Path(f"/proc/{inheritor.pid}/fd/{number}").readlink()) == "anon_inode:[eventfd]"
        assert any(r.start <= mapping.start < r.end and r.perms == "---p" for r in read_maps(inheritor.pid))


@pytest.mark.parametrize(
    ("flags", "change", "why"),
    [
        (0, {"inherited": frozenset()}, "its own"),
        (0, {"started": 1}, "another process has its pid"),
        (CLONE_FILES, {}, "shares memory or descriptors"),
    ],
    ids=["own descriptor", "pid of another", "descriptors of a CUDA process"],
)
def test_process_is_left_alone(flags: int, change: dict[str, object], why: str) -> None:
    with forked(flags) as inheritor:
        before = look(inheritor.pid, WANTED)
        with pytest.raises(Refused, match=why):
            release(replace(inheritor, **change), [os.getpid()], WANTED, seconds=SECONDS)  # type: ignore[arg-type]
        assert look(inheritor.pid, WANTED) == before


def test_process_that_has_got_the_pid_is_not_even_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> SeizedProcess:
        raise AssertionError("it was stopped")

    with forked() as inheritor:
        monkeypatch.setattr("kybernate_shim.vram_mover.release.SeizedProcess", never)
        with pytest.raises(Refused, match="another process has its pid"):
            release(replace(inheritor, started=inheritor.started + 1), [], WANTED, seconds=SECONDS)


def test_process_with_too_many_descriptors_is_left_alone() -> None:
    with forked(descriptors=MOST_DESCRIPTORS + 1) as inheritor:
        with pytest.raises(Refused, match="at most"):
            release(inheritor, [], WANTED, seconds=SECONDS)
        assert look(inheritor.pid, WANTED).descriptors == inheritor.inherited


def test_nothing_is_done_when_the_time_is_over() -> None:
    with forked() as inheritor:
        before = look(inheritor.pid, WANTED)
        with pytest.raises(InjectionFailed, match="too long"):
            release(inheritor, [], WANTED, seconds=SECONDS, expired=lambda: True)
        assert look(inheritor.pid, WANTED) == before


def test_process_that_has_ended_is_told() -> None:
    with forked() as inheritor:
        pass
    with pytest.raises(TargetEnded):
        release(inheritor, [], WANTED, seconds=SECONDS)

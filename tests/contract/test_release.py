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

from kybernate_shim.cuda.device_files import look
from kybernate_shim.cuda.heirs import identity
from kybernate_shim.cuda.release import MOST_DESCRIPTORS, Heir, NotReleased, release
from kybernate_shim.linux.memory import read_maps
from kybernate_shim.linux.tracee import InjectionFailed, TargetEnded

pytestmark = pytest.mark.root
WANTED = frozenset({(stat.S_IFCHR, 1)})
CLONE_FILES = 0x400
CLONE = {"x86_64": 56, "aarch64": 220}
SECONDS = 5.0


def pauses() -> None:
    while True:
        signal.pause()


@contextmanager
def forked(flags: int = 0, descriptors: int = 1) -> Iterator[Heir]:
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
        yield Heir(pid, who.started, look(pid, WANTED).descriptors)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        mapped.close()
        for fd in (device, ready, go):
            os.close(fd)


def test_numbers_and_addresses_stay_taken() -> None:
    with forked() as heir:
        (mapping, *_), descriptors = look(heir.pid, WANTED).mappings, heir.inherited
        given = release(heir, [], WANTED, seconds=SECONDS)
        assert (given.descriptors, given.kept_bytes) == (len(descriptors), 0)
        assert given.bytes >= mmap.PAGESIZE
        assert not look(heir.pid, WANTED)
        for number in descriptors:
            assert str(Path(f"/proc/{heir.pid}/fd/{number}").readlink()) == "anon_inode:[eventfd]"
        assert any(r.start <= mapping.start < r.end and r.perms == "---p" for r in read_maps(heir.pid))


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
    with forked(flags) as heir:
        before = look(heir.pid, WANTED)
        with pytest.raises(NotReleased, match=why):
            release(replace(heir, **change), [os.getpid()], WANTED, seconds=SECONDS)  # type: ignore[arg-type]
        assert look(heir.pid, WANTED) == before


def test_process_with_too_many_descriptors_is_left_alone() -> None:
    with forked(descriptors=MOST_DESCRIPTORS + 1) as heir:
        with pytest.raises(NotReleased, match="at most"):
            release(heir, [], WANTED, seconds=SECONDS)
        assert look(heir.pid, WANTED).descriptors == heir.inherited


def test_nothing_is_done_when_the_time_is_over() -> None:
    with forked() as heir:
        before = look(heir.pid, WANTED)
        with pytest.raises(InjectionFailed, match="too long"):
            release(heir, [], WANTED, seconds=SECONDS, expired=lambda: True)
        assert look(heir.pid, WANTED) == before


def test_process_that_has_ended_is_told() -> None:
    with forked() as heir:
        pass
    with pytest.raises(TargetEnded):
        release(heir, [], WANTED, seconds=SECONDS)

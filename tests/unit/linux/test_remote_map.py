"""Files of ours in the memory of real processes that know nothing of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux.memory import Region, read_maps
from kybernate_shim.linux.ptrace import Held
from kybernate_shim.linux.remote_map import lending
from kybernate_shim.linux.tracee import InjectionFailed
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
SIZE = 4 * MIB


@pytest.fixture
def target() -> Iterator[MemoryProcess]:
    with MemoryProcess() as process:
        yield process


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(bytes(MIB) + b"\x07" * SIZE)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd
    os.close(fd)


def descriptors(target: MemoryProcess) -> set[str]:
    return {fd.name for fd in Path(f"/proc/{target.pid}/fd").iterdir()}


def anonymous(target: MemoryProcess) -> list[Region]:
    return [region for region in read_maps(target.pid) if region.private_anonymous]


def test_file_appears_in_place_of_memory_and_nothing_else_stays(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, memory = descriptors(target), anonymous(target)
    with Held(target.pid) as held, lending(held) as lent:
        lent.map_private(file, region.start + MIB, 2 * MIB, MIB)
    assert target.ask("maps['a'][1 << 20:3 << 20] == bytes([7]) * (2 << 20)")
    assert target.ask("7 != max(maps['a'][:1 << 20]) and max(maps['a'][3 << 20:]) > 7")
    assert descriptors(target) == before
    grown = {
        one for one in anonymous(target) if not any(one.start >= old.start and one.end <= old.end for old in memory)
    }
    assert not grown


def test_what_the_process_writes_stays_its_own(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    with Held(target.pid) as held, lending(held) as lent:
        lent.map_private(file, region.start, SIZE, MIB)
    assert target.ask("maps['a'].__setitem__(slice(0, 3), b'own')") is None
    assert target.ask("maps['a'][:5]") == b"own\x07\x07"
    assert os.pread(file, 5, MIB) == b"\x07" * 5


def test_several_files_one_after_the_other(target: MemoryProcess, file: int) -> None:
    regions = [target.region(name, SIZE) for name in ("a", "b", "c")]
    with Held(target.pid) as held, lending(held) as lent:
        for region in regions:
            lent.map_private(file, region.start, SIZE, MIB)
    assert target.ask("maps['a'][:] == maps['b'][:] == maps['c'][:] == bytes([7]) * (4 << 20)")


def test_process_that_may_open_no_more_files_is_as_it_was(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, digest = descriptors(target), target.digest("a")
    target.ask("__import__('resource').setrlimit(7, (len(os.listdir('/proc/self/fd')) + 1, 4096))")
    with pytest.raises(InjectionFailed, match="open files"), Held(target.pid) as held, lending(held) as lent:
        lent.map_private(file, region.start, SIZE, MIB)
    assert (descriptors(target), target.digest("a")) == (before, digest)


def test_file_that_cannot_be_mapped_leaves_the_memory(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, digest = descriptors(target), target.digest("a")
    with pytest.raises(InjectionFailed, match="EINVAL"), Held(target.pid) as held, lending(held) as lent:
        lent.map_private(file, region.start, SIZE, 77)
    assert (descriptors(target), target.digest("a")) == (before, digest)

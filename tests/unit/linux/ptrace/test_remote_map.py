"""Files of ours in the memory of real processes that know nothing of them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.ptrace import remote_map
from kybernate_shim.linux.ptrace.remote_map import remote_page
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
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


def own_descriptors() -> set[str]:
    return {fd.name for fd in Path("/proc/self/fd").iterdir()}


def anonymous(target: MemoryProcess) -> list[Region]:
    return [region for region in read_maps(target.pid) if region.private_anonymous]


def test_file_appears_in_place_of_memory_and_nothing_else_stays(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, memory = descriptors(target), anonymous(target)
    with SeizedProcess(target.pid) as held, remote_page(held) as page:
        page.map_private(file, region.start + MIB, 2 * MIB, MIB)
    assert target.ask("maps['a'][1 << 20:3 << 20] == bytes([7]) * (2 << 20)")
    assert target.ask("7 != max(maps['a'][:1 << 20]) and max(maps['a'][3 << 20:]) > 7")
    assert descriptors(target) == before
    grown = {
        one for one in anonymous(target) if not any(one.start >= old.start and one.end <= old.end for old in memory)
    }
    assert not grown


def test_what_the_process_writes_stays_its_own(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    with SeizedProcess(target.pid) as held, remote_page(held) as page:
        page.map_private(file, region.start, SIZE, MIB)
    assert target.ask("maps['a'].__setitem__(slice(0, 3), b'own')") is None
    assert target.ask("maps['a'][:5]") == b"own\x07\x07"
    assert os.pread(file, 5, MIB) == b"\x07" * 5


def test_several_files_one_after_the_other(target: MemoryProcess, file: int) -> None:
    regions = [target.region(name, SIZE) for name in ("a", "b", "c")]
    with SeizedProcess(target.pid) as held, remote_page(held) as page:
        for region in regions:
            page.map_private(file, region.start, SIZE, MIB)
    assert target.ask("maps['a'][:] == maps['b'][:] == maps['c'][:] == bytes([7]) * (4 << 20)")


def test_process_that_may_open_no_more_files_is_as_it_was(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, digest = descriptors(target), target.digest("a")
    target.ask("__import__('resource').setrlimit(7, (len(os.listdir('/proc/self/fd')) + 1, 4096))")
    with (
        pytest.raises(InjectionFailed, match="open files"),
        SeizedProcess(target.pid) as held,
        remote_page(held) as page,
    ):
        page.map_private(file, region.start, SIZE, MIB)
    assert (descriptors(target), target.digest("a")) == (before, digest)


def test_file_that_cannot_be_mapped_leaves_the_memory(target: MemoryProcess, file: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, digest = descriptors(target), target.digest("a")
    with pytest.raises(InjectionFailed, match="EINVAL"), SeizedProcess(target.pid) as held, remote_page(held) as page:
        page.map_private(file, region.start, SIZE, 77)
    assert (descriptors(target), target.digest("a")) == (before, digest)


def test_descriptor_that_another_thread_exchanges_is_not_believed(
    target: MemoryProcess, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number comes from memory of the process, which any of its threads can write."""
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before, content = descriptors(target), target.digest("a")
    read = remote_map._read

    def forged(pid: int, address: int, size: int) -> bytes:
        data = read(pid, address, size)
        return data if size != remote_map.CONTROL_BYTES else data[:16] + struct.pack("=i4x", 0)

    monkeypatch.setattr(remote_map, "_read", forged)
    with (
        pytest.raises(InjectionFailed, match="not the one"),
        SeizedProcess(target.pid) as held,
        remote_page(held) as page,
    ):
        page.map_private(file, region.start, SIZE, MIB)
    assert target.digest("a") == content
    assert len(descriptors(target)) == len(before) + 1  # ours, whose number only the process knows


@pytest.mark.parametrize("number", [0, 999], ids=["a-pipe", "none"])
def test_socket_that_another_thread_exchanges_is_not_believed(
    target: MemoryProcess, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ours = own_descriptors()
    monkeypatch.setattr(remote_map, "_read", lambda pid, address, size: struct.pack("=ii", number, number))
    with pytest.raises(InjectionFailed), SeizedProcess(target.pid) as held, remote_page(held):
        raise AssertionError("it was believed")
    assert own_descriptors() == ours

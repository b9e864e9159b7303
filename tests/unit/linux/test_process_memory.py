"""Another process's memory: maps as the kernel prints them, copies that are whole or an error."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.process_memory import Region, ShortCopy, parse_maps, read_into, read_maps, write_from
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
MAPS = """\
55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                          [heap]
7f1a00000000-7f1e26a00000 rw-p 00000000 00:00 0 
7f1e26a00000-7f1e26a01000 ---p 00000000 00:00 0 
7f1e30000000-7f1e30200000 rw-p 00000000 00:00 0                          [anon: arena 1]
7f1e40000000-7f1e40001000 rw-s 00000000 00:01 1024                       /dev/zero (deleted)
7f1e50000000-7f1e50001000 r-xp 00001000 08:01 77                         /opt/a b/lib.so
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""  # noqa: W291  # the kernel ends lines without a name with a space
PERMS = st.sampled_from(["rw-p", "r--p", "---p", "rw-s", "r-xp"])
NAMES = st.sampled_from(["", "[heap]", "/a b", "[anon:x]"])


def test_maps_lines_become_regions() -> None:
    regions = parse_maps(MAPS)
    assert regions[1] == Region(0x7F1A00000000, 0x7F1E26A00000, "rw-p", 0, "")
    assert regions[1].size == 17_827_889_152 - 17_827_889_152 % 4096
    assert [region.name for region in regions[3:6]] == ["[anon: arena 1]", "/dev/zero (deleted)", "/opt/a b/lib.so"]
    assert [(os.major(one.device), os.minor(one.device), one.inode) for one in regions[4:6]] == [
        (0, 1, 1024),
        (8, 1, 77),
    ]
    assert [region.private_anonymous for region in regions] == [False, True, False, True, False, False, False]


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**30), PERMS, st.integers(0, 2**32), NAMES), max_size=20)
)
def test_maps_of_any_lines_are_read_back(lines: list[tuple[int, int, str, int, str]]) -> None:
    wanted = [Region(start, start + size, perms, inode, name) for start, size, perms, inode, name in lines]
    text = "".join(f"{r.start:x}-{r.end:x} {r.perms} 00000000 00:00 {r.inode} {r.name}\n" for r in wanted)
    assert parse_maps(text) == wanted


def test_own_maps_hold_what_was_just_mapped() -> None:
    with mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert any(
            r.start <= address and address + MIB <= r.end and r.private_anonymous for r in read_maps(os.getpid())
        )


@pytest.mark.parametrize("separator", [b"\r", b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b"\xff", b"\n"])
def test_name_of_a_file_makes_no_region(tmp_path: Path, separator: bytes) -> None:
    """A program chooses the names of what it maps; only a line's end is escaped by the kernel."""
    path = tmp_path / os.fsdecode(b"a" + separator + b"1000-2000 rw-p 00000000 00:00 0 ")
    with path.open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ):
            regions = read_maps(os.getpid())
        inode = os.fstat(file.fileno()).st_ino
    assert [one.size for one in regions if one.inode == inode] == [mmap.PAGESIZE]
    assert not [one for one in regions if one.start == 0x1000]


def test_bytes_go_out_of_a_process_and_into_it() -> None:
    buffer = ctypes.create_string_buffer(MIB)
    with MemoryProcess() as target:
        region = target.region("a", 2 * MIB)
        target.fill("a", 0, 2 * MIB)
        read_into(target.pid, region.start + MIB, ctypes.addressof(buffer), MIB)
        write_from(target.pid, region.start, ctypes.addressof(buffer), MIB)
        assert buffer.raw != bytes(MIB)
        assert target.ask("maps['a'][:1 << 20] == maps['a'][1 << 20:]") is True


@pytest.mark.parametrize("call", [read_into, write_from])
def test_range_that_ends_early_is_a_short_copy(call: object) -> None:
    assert callable(call)
    buffer = ctypes.create_string_buffer(4 * MIB)
    with MemoryProcess() as target:
        region = target.region("a", 4 * MIB)
        target.ask("maps['a'].resize(1 << 20)")
        with pytest.raises(ShortCopy, match=f"{MIB} of {4 * MIB} bytes at {region.start:#x}"):
            call(target.pid, region.start, ctypes.addressof(buffer), 4 * MIB)


def test_unmapped_address_and_ended_process_are_told_apart() -> None:
    buffer = ctypes.create_string_buffer(4096)
    with MemoryProcess() as target:
        with pytest.raises(OSError, match=f"process {target.pid} at 0x1000") as caught:
            read_into(target.pid, 0x1000, ctypes.addressof(buffer), 4096)
        assert caught.value.errno == errno.EFAULT
        target.kill()
        with pytest.raises(ProcessLookupError):
            read_into(target.pid, 0x1000, ctypes.addressof(buffer), 4096)

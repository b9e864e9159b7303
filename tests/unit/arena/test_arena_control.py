"""The page that a process shares with the node: no number in it makes the node do more than there is to do."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.arena import control
from kybernate_shim.arena.control import (
    ANSWERED,
    BLOCK,
    BYTES,
    MAGIC,
    MOST_BLOCKS,
    MOST_BYTES,
    PRIVATE,
    SEALS,
    TABLE_AT,
    USED,
    VERSION,
    BlockState,
    Control,
    ControlFailed,
    ControlUnusable,
    Verb,
    control_of,
)
from kybernate_shim.linux.process_memory import read_maps

PIECE = 2 << 20


@pytest.fixture
def page() -> Iterator[mmap.mmap]:
    """A page as the library makes it, in this process, for `opened`."""
    fd = os.memfd_create(control.NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    with mmap.mmap(fd, BYTES) as found:
        os.close(fd)
        struct.pack_into("<II", found, 0, MAGIC, VERSION)
        yield found


def opened() -> Control:
    found = control_of(os.getpid())
    assert found is not None
    return found


def put(page: mmap.mmap, index: int, *, size: int = PIECE, state: int = BlockState.HERE, device: int = 0) -> None:
    BLOCK.pack_into(page, TABLE_AT + index * BLOCK.size, 0x1000, size, 0, 0, state, 0, device, -1, 0, 0, 0, 0, 0)
    struct.pack_into("<I", page, USED, index + 1)


def test_part_of_the_table_is_read(page: mmap.mmap) -> None:
    for index in range(6):
        put(page, index, state=BlockState.UNUSED if index == 3 else BlockState.HERE)
    with opened() as found:
        assert [block.index for block in found.blocks()] == [0, 1, 2, 4, 5]
        assert [block.index for block in found.blocks(2, 3)] == [2, 4]
        assert found.blocks(6, 9) == found.blocks(MOST_BLOCKS, 1) == []


def test_number_of_blocks_that_is_none_reads_the_table_alone(page: mmap.mmap) -> None:
    put(page, MOST_BLOCKS - 1)
    struct.pack_into("<I", page, USED, 0xFFFFFFFF)
    with opened() as found:
        assert [block.index for block in found.blocks()] == [MOST_BLOCKS - 1]


@pytest.mark.parametrize(
    "lie",
    [
        {"size": 0},
        {"size": PIECE + 1},
        {"size": MOST_BYTES + PIECE},
        {"state": max(BlockState) + 1},
        {"device": -1},
        {"device": 64},
    ],
)
def test_block_that_cannot_be_is_refused(page: mmap.mmap, lie: dict[str, int]) -> None:
    put(page, 4, **lie)
    with opened() as found, pytest.raises(ControlUnusable, match="block 4 of process"):
        found.blocks()


def test_answers_that_never_end_are_given_up(page: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter changes under each look, so no wait for it sleeps; there is a pause all the same."""
    pauses: list[float] = []
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(control.futex, "wait", lambda *_: None)
    struct.pack_into("<I", page, ANSWERED, 7)
    with opened() as found, pytest.raises(ControlUnusable, match="does not answer probe"):
        found.ask(Verb.PROBE, seconds=0.1)
    assert len(pauses) <= 101


def test_process_that_is_a_zombie_is_not_waited_for(page: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may take its time."""
    monkeypatch.setattr(control.futex, "wait", lambda *_: None)
    with subprocess.Popen(["true"]) as ended, opened() as found:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        found.pid = ended.pid
        with pytest.raises(ControlUnusable, match=f"process {ended.pid} has ended"):
            found.ask(Verb.PROBE, seconds=5)


def test_file_of_the_same_name_elsewhere_is_not_opened(tmp_path: Path) -> None:
    """A filesystem of the tenant's could keep a process that opens it waiting forever."""
    path = tmp_path / f"memfd:{control.NAME} (deleted)"
    path.write_bytes(bytes(BYTES))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), BYTES):
        region = next(one for one in read_maps(os.getpid()) if one.name == str(path))
        patched = region._replace(name=control.MAPPED_AS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "read_maps", lambda pid: [patched])
            assert not control.is_there(os.getpid())
            assert control_of(os.getpid()) is None


def test_private_memory_may_have_any_size(page: mmap.mmap) -> None:
    put(page, 0, size=PIECE + 4096)
    flags = TABLE_AT + struct.calcsize("<QQQQI")
    struct.pack_into("<I", page, flags, PRIVATE)
    with opened() as found:
        assert found.blocks()[0].private


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-16, "busy"),
        (-4095, ""),
        (2, "CUDA error 2"),
        (-4096, "CUDA error -4096"),
        (-(1 << 31), "CUDA error -2147483648"),
    ],
)
def test_any_answer_of_a_program_has_words(code: int, words: str) -> None:
    """It is a number of the program's own, of which the kernel's errors are a few."""
    failed = ControlFailed(Verb.SHARE, code)
    assert words in str(failed)
    assert failed.busy == (code == -16)

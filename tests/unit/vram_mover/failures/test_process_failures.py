"""The data path when the process changes, ends or is traced: each failure by its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kybernate_shim.linux import process_memory
from kybernate_shim.linux.process_memory import Region
from kybernate_shim.linux.ptrace.seized import SeizedProcess, drop_pages_of
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.vram_io import errors
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover import save as save_module
from kybernate_shim.vram_mover import target
from kybernate_shim.vram_mover.load import load, put_back
from kybernate_shim.vram_mover.save import move_out, save
from tests.fakes.memory_process import MemoryProcess
from tests.unit.vram_mover.failures.faulty import MIB, SIZE, SMALL, at_piece, flip


@pytest.mark.parametrize("change", ["maps['a'].resize(4 << 20)", "maps['a'].close()"], ids=["shrunk", "unmapped"])
def test_region_that_changed_before_is_named(
    process: MemoryProcess, region: Region, tmp_path: Path, change: str
) -> None:
    [saved] = save(process.pid, [region], tmp_path, ["before"])
    process.ask(change)
    with pytest.raises(errors.RegionChanged, match="no private memory at"):
        save(process.pid, [region], tmp_path, ["after"], SMALL)
    with pytest.raises(errors.RegionChanged, match="no private memory at"):
        load(process.pid, [saved], tmp_path, SMALL)
    with pytest.raises(errors.RegionChanged, match="no private memory at"):
        move_out(process.pid, [region], tmp_path, ["after"], print, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_region_that_became_read_only_is_no_longer_the_one(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    process.ask(f"libc.mprotect(ctypes.c_void_p({region.start + 4 * MIB}), {4 * MIB}, 1)")
    with pytest.raises(errors.RegionChanged, match=f"at {region.start + 4 * MIB:#x}"):
        save(process.pid, [region], tmp_path, ["v"])


def test_region_that_shrinks_in_the_middle_is_named(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_piece(monkeypatch, 3, lambda: process.ask("maps['a'].resize(4 << 20)"))
    with pytest.raises(errors.RegionChanged, match="not all there any more"):
        save(process.pid, [region], tmp_path, ["v"], CopyOptions(threads=1, piece_bytes=MIB))
    assert not list(tmp_path.iterdir())


def test_region_that_grew_is_saved_as_it_was_asked_for(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    half = region._replace(end=region.start + SIZE // 2)
    saved = save(process.pid, [half], tmp_path, ["v"])
    process.drop(saved)
    assert process.resident_kib(region) == SIZE // 2 // 1024


@pytest.mark.parametrize("threads", [1, 4])
def test_target_killed_in_the_middle_of_a_save_is_named_and_leaves_no_file(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    at_piece(monkeypatch, 3, process.kill)
    with pytest.raises(errors.TargetGone, match=f"process {process.pid} has ended"):
        save(process.pid, [region], tmp_path, ["v"], CopyOptions(threads=threads, piece_bytes=MIB))
    assert not list(tmp_path.iterdir())


def test_target_killed_in_the_middle_of_a_load_is_named(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    at_piece(monkeypatch, 3, process.kill)
    with pytest.raises(errors.TargetGone, match=f"process {process.pid} has ended"):
        load(process.pid, saved, tmp_path, SMALL)


def test_ended_target_is_named_by_all_three(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for zombie in (True, False):
        if not zombie:
            process.kill()
        with pytest.raises(errors.TargetGone):
            save(process.pid, [region], tmp_path, ["w"])
        with pytest.raises(errors.TargetGone):
            load(process.pid, saved, tmp_path)
        with pytest.raises((errors.TargetGone, errors.DataPathRefused)):
            move_out(process.pid, [region], tmp_path, ["w"], print)


def test_foreign_target_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's answer is put in its mouth: a process that root may not read needs a security module."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process_memory, "read_into", refuse)
    with pytest.raises(errors.DataPathRefused, match="cannot be accessed: Operation not permitted"):
        target.read_into(1, 0, 0, 4096)


def test_bytes_leave_while_they_are_saved(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "DROP_BYTES", 2 * MIB)
    before, parts = process.digest("a"), []

    def announce(part: SavedRegion) -> None:
        assert process.resident_kib(region) == (SIZE - sum(one.size for one in parts)) // 1024
        parts.append(part)

    [saved] = move_out(process.pid, [region], tmp_path, ["v"], announce, CopyOptions(threads=1, piece_bytes=MIB))
    assert [(part.start - region.start, part.size, part.offset) for part in parts] == [
        (offset, 2 * MIB, offset) for offset in range(0, SIZE, 2 * MIB)
    ]
    assert (saved.start, saved.size, saved.data_bytes, process.resident_kib(region)) == (region.start, SIZE, SIZE, 0)
    load(process.pid, [saved], tmp_path, SMALL)
    assert process.digest("a") == before


@pytest.mark.parametrize("threads", [1, 4])
def test_parts_that_were_announced_bring_everything_back_after_a_failure(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(save_module, "DROP_BYTES", MIB)
    other = process.region("b", SIZE)
    process.fill("b", 0, SIZE, seed=3)
    before, parts = (process.digest("a"), process.digest("b")), list[SavedRegion]()
    real = drop_pages_of

    def fails_in_the_middle(held: SeizedProcess, pid: int, start: int, size: int) -> None:
        if start >= other.start + 3 * MIB:
            real(held, pid, start, size // 2)
            raise InjectionFailed("half way")
        real(held, pid, start, size)

    monkeypatch.setattr(save_module, "drop_pages_of", fails_in_the_middle)
    with pytest.raises(errors.DataPathRefused, match="half way"):
        move_out(
            process.pid,
            [region, other],
            tmp_path,
            ["a", "b"],
            parts.append,
            CopyOptions(threads=threads, piece_bytes=MIB),
        )
    assert process.resident_kib(region) == 0
    put_back(process.pid, parts, tmp_path)
    assert (process.digest("a"), process.digest("b")) == before


def test_nothing_is_dropped_that_was_not_announced(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    def refuse(part: SavedRegion) -> None:
        raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError):
        move_out(process.pid, [region], tmp_path, ["v"], refuse, SMALL)
    assert process.resident_kib(region) == SIZE // 1024


def test_damaged_part_is_not_put_back_in_silence(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "DROP_BYTES", MIB)
    parts: list[SavedRegion] = []
    move_out(process.pid, [region], tmp_path, ["v"], parts.append, SMALL)
    flip(tmp_path / "v", 5 * MIB)
    with pytest.raises(errors.VramError, match="must not run"):
        put_back(process.pid, parts, tmp_path)


def test_file_that_ends_before_a_part_does_is_damaged(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    parts: list[SavedRegion] = []
    move_out(process.pid, [region], tmp_path, ["v"], parts.append, SMALL)
    os.truncate(tmp_path / "v", SIZE - 4096)
    with pytest.raises(errors.VramError):
        put_back(process.pid, parts, tmp_path)


def test_traced_target_keeps_its_bytes_and_says_who_traces_it(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    before = process.digest("a")
    with SeizedProcess(process.pid), pytest.raises(errors.DataPathRefused, match="traces it already"):
        move_out(process.pid, [region], tmp_path, ["v"], print)
    assert process.digest("a") == before
    assert not list(tmp_path.iterdir())


def test_held_target_is_saved_and_loaded_without_being_let_go(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    before = process.digest("a")
    with SeizedProcess(process.pid, spare=lambda name: False):
        saved = save(process.pid, [region], tmp_path, ["v"])
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "t"
        load(process.pid, saved, tmp_path)
    assert process.digest("a") == before

"""A move that is cancelled, or whose arguments are wrong, leaves no file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kybernate_shim.linux.process_memory import Region
from kybernate_shim.vram_io import errors
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import load, put_back
from kybernate_shim.vram_mover.save import move_out, save
from tests.fakes.memory_process import MemoryProcess
from tests.unit.vram_mover.failures.faulty import MIB, SIZE, SMALL


def test_cancelled_save_ends_and_leaves_no_file(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    cancel = threading.Event()
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        cancel.set()

    how = CopyOptions(threads=2, piece_bytes=MIB, on_progress=progress, cancel=cancel)
    with pytest.raises(errors.VramError, match="cancelled after"):
        save(process.pid, [region], tmp_path, ["v"], how)
    assert len(seen) <= 2  # at most a piece a thread was on its way
    assert not list(tmp_path.iterdir())


def test_cancelled_load_stops(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(errors.VramError, match="cancelled"):
        load(process.pid, saved, tmp_path, CopyOptions(cancel=cancel))


def test_cancelled_operation_still_puts_its_bytes_back(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    before, parts, cancel = process.digest("a"), list[SavedRegion](), threading.Event()
    move_out(process.pid, [region], tmp_path, ["v"], parts.append)
    cancel.set()
    put_back(process.pid, parts, tmp_path, CopyOptions(cancel=cancel))
    assert process.digest("a") == before


def test_progress_that_raises_ends_the_transfer(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    def raise_(done: int) -> None:
        raise ZeroDivisionError(done)

    with pytest.raises(ZeroDivisionError):
        save(process.pid, [region], tmp_path, ["v"], CopyOptions(on_progress=raise_))
    assert not list(tmp_path.iterdir())


def test_wrong_number_of_names_is_a_mistake(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        save(process.pid, [region], tmp_path, ["v", "w"])
    assert not list(tmp_path.iterdir())


def test_load_writes_nothing_where_the_target_is_not_what_was_saved(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    elsewhere = SavedRegion("v", region.start + 4096, SIZE, saved[0].data_bytes, saved[0].digest)
    process.ask(f"libc.munmap(ctypes.c_void_p({region.end}), 4096)")
    before = process.digest("a")
    with pytest.raises(errors.RegionChanged):
        load(process.pid, [elsewhere], tmp_path)
    assert process.digest("a") == before

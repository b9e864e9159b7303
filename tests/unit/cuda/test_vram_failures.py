"""The data path when something goes wrong: each failure by its name, and the process as the name says."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.cuda.vram import crew, digest, errors, files, target
from kybernate_shim.cuda.vram import save as save_module
from kybernate_shim.cuda.vram.crew import Transfer
from kybernate_shim.cuda.vram.load import load, put_back
from kybernate_shim.cuda.vram.save import move_out, save
from kybernate_shim.cuda.vram.saved import SavedRegion
from kybernate_shim.linux import memory
from kybernate_shim.linux.memory import Region
from kybernate_shim.linux.ptrace import Held, drop_pages_of
from kybernate_shim.linux.tracee import InjectionFailed
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
SIZE = 8 * MIB
SMALL = Transfer(threads=2, piece_bytes=MIB)


@pytest.fixture
def process() -> Iterator[MemoryProcess]:
    with MemoryProcess() as running:
        yield running


@pytest.fixture
def region(process: MemoryProcess) -> Region:
    found = process.region("a", SIZE)
    process.fill("a", 0, SIZE)
    return found


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# -- The process ------------------------------------------------------------------------------------------------------


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
        save(process.pid, [region], tmp_path, ["v"], Transfer(threads=1, piece_bytes=MIB))
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
        save(process.pid, [region], tmp_path, ["v"], Transfer(threads=threads, piece_bytes=MIB))
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
        with pytest.raises((errors.TargetGone, errors.NotDropped)):
            move_out(process.pid, [region], tmp_path, ["w"], print)


def test_foreign_target_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's answer is put in its mouth: a process that root may not read needs a security module."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(memory, "read_into", refuse)
    with pytest.raises(errors.TargetRefused, match="not for us: Operation not permitted"):
        target.read_into(1, 0, 0, 4096)


def at_piece(monkeypatch: pytest.MonkeyPatch, number: int, action: object) -> None:
    """Do `action` before a crew's piece of that number."""
    assert callable(action)
    original, count = crew._Crew._next, [0]

    def counted(self: crew._Crew[object]) -> crew.Piece[object] | None:
        piece = original(self)
        count[0] += 1
        if count[0] == number:
            action()
        return piece

    monkeypatch.setattr(crew._Crew, "_next", counted)


# -- Dropping ---------------------------------------------------------------------------------------------------------


def test_bytes_leave_while_they_are_saved(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "DROP_BYTES", 2 * MIB)
    before, parts = process.digest("a"), []

    def announce(part: SavedRegion) -> None:
        assert process.resident_kib(region) == (SIZE - sum(one.size for one in parts)) // 1024
        parts.append(part)

    [saved] = move_out(process.pid, [region], tmp_path, ["v"], announce, Transfer(threads=1, piece_bytes=MIB))
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

    def fails_in_the_middle(held: Held, pid: int, start: int, size: int) -> None:
        if start >= other.start + 3 * MIB:
            real(held, pid, start, size // 2)
            raise InjectionFailed("half way")
        real(held, pid, start, size)

    monkeypatch.setattr(save_module, "drop_pages_of", fails_in_the_middle)
    with pytest.raises(errors.NotDropped, match="half way"):
        move_out(
            process.pid, [region, other], tmp_path, ["a", "b"], parts.append, Transfer(threads=threads, piece_bytes=MIB)
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
    with pytest.raises(errors.DigestMismatch, match="must not run"):
        put_back(process.pid, parts, tmp_path)


def test_file_that_ends_before_a_part_does_is_damaged(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    parts: list[SavedRegion] = []
    move_out(process.pid, [region], tmp_path, ["v"], parts.append, SMALL)
    os.truncate(tmp_path / "v", SIZE - 4096)
    with pytest.raises(errors.FileDamaged):
        put_back(process.pid, parts, tmp_path)


def test_traced_target_keeps_its_bytes_and_says_who_traces_it(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    before = process.digest("a")
    with Held(process.pid), pytest.raises(errors.NotDropped, match="traces it already"):
        move_out(process.pid, [region], tmp_path, ["v"], print)
    assert process.digest("a") == before
    assert not list(tmp_path.iterdir())


def test_held_target_is_saved_and_loaded_without_being_let_go(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    before = process.digest("a")
    with Held(process.pid, spare=lambda name: False):
        saved = save(process.pid, [region], tmp_path, ["v"])
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "t"
        load(process.pid, saved, tmp_path)
    assert process.digest("a") == before


# -- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 3 * MIB + 77, SIZE - 1])
def test_flipped_bit_is_a_digest_mismatch(process: MemoryProcess, region: Region, tmp_path: Path, offset: int) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    flip(tmp_path / "v", offset)
    with pytest.raises(errors.DigestMismatch, match="v does not hold the bytes that were saved"):
        load(process.pid, saved, tmp_path, SMALL)


def test_bit_in_a_hole_is_a_digest_mismatch(process: MemoryProcess, tmp_path: Path) -> None:
    saved = save(process.pid, [process.region("h", SIZE)], tmp_path, ["v"], SMALL)
    flip(tmp_path / "v", 3 * MIB)
    with pytest.raises(errors.DigestMismatch):
        load(process.pid, saved, tmp_path, SMALL)


def test_data_that_became_a_hole_is_a_digest_mismatch(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    os.truncate(tmp_path / "v", 2 * MIB)
    os.truncate(tmp_path / "v", SIZE)
    with pytest.raises(errors.DigestMismatch):
        load(process.pid, saved, tmp_path, SMALL)


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_file_of_another_length_is_damaged(process: MemoryProcess, region: Region, tmp_path: Path, size: int) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    os.truncate(tmp_path / "v", size)
    with pytest.raises(errors.FileDamaged, match=f"has {size} bytes, its region {SIZE}"):
        load(process.pid, saved, tmp_path)


def test_file_that_shrinks_in_the_middle_is_damaged(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    monkeypatch.setattr(files.RegionFile, "has_data", lambda *_: True)  # or the end is taken for a hole, see below
    at_piece(monkeypatch, 3, lambda: os.truncate(tmp_path / "v", 4 * MIB + 100))
    with pytest.raises(errors.FileDamaged, match="v ends at 4194404 bytes"):
        load(process.pid, saved, tmp_path, Transfer(threads=1, direct=False))


def test_file_that_shrinks_by_whole_pieces_does_not_pass_for_holes(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    at_piece(monkeypatch, 3, lambda: os.truncate(tmp_path / "v", 4 * MIB))
    with pytest.raises((errors.DigestMismatch, errors.FileDamaged)):
        load(process.pid, saved, tmp_path, SMALL)


def test_short_reads_and_writes_are_continued(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real_read(fd, [parts[0][: 300 << 10]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real_write(fd, [parts[0][: 300 << 10]], offset))
    before = process.digest("a")
    how = Transfer(threads=2, piece_bytes=MIB, direct=False)
    saved = save(process.pid, [region], tmp_path, ["v"], how)
    process.drop(saved)
    load(process.pid, saved, tmp_path, how)
    assert process.digest("a") == before


def test_direct_io_that_is_refused_later_goes_on_without(tmp_path: Path) -> None:
    """A buffer that direct I/O cannot take, where there is direct I/O."""
    with files.writing(tmp_path / "v", MIB, direct=True) as file:
        file.write(1, memoryview(b"x" * 999))
        back = memoryview(bytearray(999))
        file.read(1, back)
        assert bytes(back) == b"x" * 999


def test_missing_file_and_missing_directory_are_named(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    (tmp_path / "v").unlink()
    with pytest.raises(errors.FileFailed, match="v cannot be opened: No such file"):
        load(process.pid, saved, tmp_path)
    with pytest.raises(errors.FileFailed, match="cannot be opened"):
        save(process.pid, [region], tmp_path / "nowhere", ["v"])


def test_file_that_is_there_is_not_overwritten(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("precious")
    with pytest.raises(errors.FileFailed, match="b cannot be opened: File exists"):
        save(process.pid, [region, region], tmp_path, ["a", "b"])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("b", "precious")]


def test_symbolic_link_is_not_followed(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    (tmp_path / "v").rename(tmp_path / "w")
    (tmp_path / "v").symlink_to(tmp_path / "w")
    with pytest.raises(errors.FileFailed, match="cannot be opened"):
        load(process.pid, saved, tmp_path)


def test_full_filesystem_fails_the_save_and_leaves_no_file(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwritev, []

    def full(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(errors.FileFailed, match="v cannot be written: No space left on device"):
        save(process.pid, [region], tmp_path, ["v"], SMALL)
    assert not list(tmp_path.iterdir())


def test_file_that_may_not_be_so_long_is_named_and_removed(
    process: MemoryProcess, region: Region, tmp_path: Path
) -> None:
    most, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, most[1]))
    try:
        with pytest.raises(errors.FileFailed, match="v cannot be made 8388608 bytes long: File too large"):
            save(process.pid, [region], tmp_path, ["v"], SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_full_device_is_named() -> None:
    file = files.RegionFile(Path("/dev/full"), os.open("/dev/full", os.O_RDWR))
    with pytest.raises(errors.FileFailed, match="/dev/full cannot be written: No space left on device"):
        file.write(0, memoryview(b"x"))


@pytest.mark.parametrize(
    "text", ["", "sha256:00", "xxh3-128-tree:0:" + "0" * 32, "xxh3-128-tree:4096:00", "xxh3-128-tree:5:" + "0" * 32]
)
def test_digest_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(errors.DigestMismatch, match="no digest of a saved region"):
        digest.piece_bytes_of(text)


# -- The crew ---------------------------------------------------------------------------------------------------------


def test_cancelled_save_ends_and_leaves_no_file(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    cancel = threading.Event()
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        cancel.set()

    how = Transfer(threads=2, piece_bytes=MIB, on_progress=progress, cancel=cancel)
    with pytest.raises(errors.Cancelled, match="cancelled after"):
        save(process.pid, [region], tmp_path, ["v"], how)
    assert len(seen) <= 2  # at most a piece a thread was on its way
    assert not list(tmp_path.iterdir())


def test_cancelled_load_stops(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(errors.Cancelled):
        load(process.pid, saved, tmp_path, Transfer(cancel=cancel))


def test_cancelled_operation_still_puts_its_bytes_back(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    before, parts, cancel = process.digest("a"), list[SavedRegion](), threading.Event()
    move_out(process.pid, [region], tmp_path, ["v"], parts.append)
    cancel.set()
    put_back(process.pid, parts, tmp_path, Transfer(cancel=cancel))
    assert process.digest("a") == before


def test_progress_that_raises_ends_the_transfer(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    def raise_(done: int) -> None:
        raise ZeroDivisionError(done)

    with pytest.raises(ZeroDivisionError):
        save(process.pid, [region], tmp_path, ["v"], Transfer(on_progress=raise_))
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

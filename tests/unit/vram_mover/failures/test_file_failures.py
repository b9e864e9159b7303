"""The data path when a file is damaged, in the way, or has no room: each failure by its name."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from kybernate_shim.linux.process_memory import Region
from kybernate_shim.vram_io import digest, errors, files
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import load
from kybernate_shim.vram_mover.save import save
from tests.fakes.memory_process import MemoryProcess
from tests.unit.vram_mover.failures.faulty import MIB, SIZE, SMALL, at_piece, flip


@pytest.mark.parametrize("offset", [0, 3 * MIB + 77, SIZE - 1])
def test_flipped_bit_is_a_digest_mismatch(process: MemoryProcess, region: Region, tmp_path: Path, offset: int) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    flip(tmp_path / "v", offset)
    with pytest.raises(errors.VramError, match="v does not hold the bytes that were saved"):
        load(process.pid, saved, tmp_path, SMALL)


def test_bit_in_a_hole_is_a_digest_mismatch(process: MemoryProcess, tmp_path: Path) -> None:
    saved = save(process.pid, [process.region("h", SIZE)], tmp_path, ["v"], SMALL)
    flip(tmp_path / "v", 3 * MIB)
    with pytest.raises(errors.VramError):
        load(process.pid, saved, tmp_path, SMALL)


def test_data_that_became_a_hole_is_a_digest_mismatch(process: MemoryProcess, region: Region, tmp_path: Path) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    os.truncate(tmp_path / "v", 2 * MIB)
    os.truncate(tmp_path / "v", SIZE)
    with pytest.raises(errors.VramError):
        load(process.pid, saved, tmp_path, SMALL)


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_file_of_another_length_is_damaged(process: MemoryProcess, region: Region, tmp_path: Path, size: int) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"])
    os.truncate(tmp_path / "v", size)
    with pytest.raises(errors.VramError, match=f"has {size} bytes, its region {SIZE}"):
        load(process.pid, saved, tmp_path)


def test_file_that_shrinks_in_the_middle_is_damaged(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    monkeypatch.setattr(files.RegionFile, "has_data", lambda *_: True)  # or the end is taken for a hole, see below
    at_piece(monkeypatch, 3, lambda: os.truncate(tmp_path / "v", 4 * MIB + 100))
    with pytest.raises(errors.VramError, match="v ends at 4194404 bytes"):
        load(process.pid, saved, tmp_path, CopyOptions(threads=1, direct=False))


def test_file_that_shrinks_by_whole_pieces_does_not_pass_for_holes(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(process.pid, [region], tmp_path, ["v"], SMALL)
    at_piece(monkeypatch, 3, lambda: os.truncate(tmp_path / "v", 4 * MIB))
    with pytest.raises(errors.VramError):
        load(process.pid, saved, tmp_path, SMALL)


def test_short_reads_and_writes_are_continued(
    process: MemoryProcess, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real_read(fd, [parts[0][: 300 << 10]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real_write(fd, [parts[0][: 300 << 10]], offset))
    before = process.digest("a")
    how = CopyOptions(threads=2, piece_bytes=MIB, direct=False)
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
        with pytest.raises(errors.FileFailed, match="v cannot be extended to 8388608 bytes: File too large"):
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
    with pytest.raises(errors.VramError, match="not a digest of a saved region"):
        digest.piece_bytes_of(text)

"""Files that are read before a freeze."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import read_ahead as module
from kybernate_shim.checkpoint.read_ahead import CHUNK, read_ahead
from kybernate_shim.linux.mount.mountinfo import parse_line


class Reads:
    """What was read, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, read = 0, os.preadv

        def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
            self.bytes += (count := read(fd, buffers, offset))
            return count

        monkeypatch.setattr(module.os, "preadv", noted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(module, "mount_at", lambda directory: None)
    return Reads(monkeypatch)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "top"
    (top / "inner").mkdir(parents=True)
    (top / "inner" / "large").write_bytes(b"x" * (2 * CHUNK + 5))
    (top / "small").write_bytes(b"small")
    os.link(top / "small", top / "twin")
    (top / "link").symlink_to("/etc/passwd")
    os.mkfifo(top / "fifo")
    return top


def test_every_regular_file_is_read_once(tree: Path, reads: Reads) -> None:
    assert read_ahead(tree, 1 << 30) == 2 * CHUNK + 10 == reads.bytes


def test_no_more_is_read_than_memory_is_there_for(tree: Path, reads: Reads) -> None:
    assert read_ahead(tree, 100) == 2 * CHUNK + 10
    assert reads.bytes == 100


def test_holes_are_neither_read_nor_counted(tree: Path, reads: Reads) -> None:
    with (tree / "inner" / "large").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"data")
    assert read_ahead(tree, 1 << 30) < 1 << 20


def test_what_lies_in_memory_is_not_read(tree: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    tmpfs = parse_line(b"1 0 0:1 / / rw - tmpfs tmpfs rw")
    monkeypatch.setattr(module, "mount_at", lambda directory: tmpfs)
    assert read_ahead(tree, 1 << 30) == 2 * CHUNK + 10
    assert not reads.bytes


def test_what_is_skipped_is_not_read(tree: Path, reads: Reads) -> None:
    assert read_ahead(tree, 1 << 30, skip={"inner"}.__contains__) == 5


def test_walk_ends_when_it_is_stopped(tree: Path, reads: Reads) -> None:
    looks = iter(range(4))

    def check() -> None:
        if next(looks, None) is None:
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError, match="stopped"):
        read_ahead(tree, 1 << 30, check=check)

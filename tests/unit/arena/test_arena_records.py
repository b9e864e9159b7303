"""What is written of bytes in the arena: only what was confirmed to its end is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.arena import records
from kybernate_shim.arena.extents import HOLE, Extent, Kept
from kybernate_shim.arena.pieces import MARK, PIECE
from kybernate_shim.arena.records import Record

HASHED = b"\1" * MARK
BLOCKS = [
    Kept(0, 0x1000, PIECE, (Extent(0, PIECE),), HASHED),
    Kept(3, 0x9000, 2 * PIECE, (Extent(HOLE, PIECE), Extent(PIECE, PIECE)), 2 * HASHED),
    Kept(4, 0x20000, PIECE, (Extent(3 * PIECE, PIECE),)),
]
UNKNOWN = [Kept(one.index, one.address, one.size, one.extents, bytes(len(one.marks))) for one in BLOCKS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A note of room for BLOCKS, of which nothing is there."""
    found = tmp_path / "17-4.json"
    records.write(found, Record([], b"key", UNKNOWN, "pod"))
    return found


def test_room_is_pending_until_it_is_confirmed_group_by_group(path: Path) -> None:
    assert records.read(path) == Record([], b"key", UNKNOWN, "pod")
    records.confirm(path, BLOCKS, 1, 3)
    assert records.read(path) == Record(BLOCKS[1:], b"key", UNKNOWN[:1], "pod")
    records.confirm(path, BLOCKS, 0, 1)
    record = records.read(path)
    assert record == Record(BLOCKS, b"key", [], "pod")
    records.write(path, record)
    assert records.read(path) == record


def test_room_counts_whether_it_is_confirmed_or_not(path: Path) -> None:
    records.confirm(path, BLOCKS, 0, 1)
    record = records.read(path)
    assert list(record.extents) == [Extent(0, PIECE)]
    assert record.room_bytes == 3 * PIECE


def test_confirmation_that_was_cut_off_anywhere_confirms_nothing(path: Path) -> None:
    before = path.stat().st_size
    records.confirm(path, BLOCKS, 0, 3)
    text = path.read_text()
    for end in range(before, len(text)):
        path.write_text(text[:end])
        assert records.read(path) == Record([], b"key", UNKNOWN, "pod")


def test_note_that_is_gone_confirms_nothing(path: Path) -> None:
    path.unlink()
    with pytest.raises(FileNotFoundError):
        records.confirm(path, BLOCKS, 0, 3)
    assert records.read(path).kept == []


def test_note_of_a_version_without_confirmations_is_believed(path: Path) -> None:
    path.write_text('{"key": "", "blocks": [[0, 4096, 2097152, [[0, 2097152]]]]}\n\n')
    assert [one.index for one in records.read(path).kept] == [0]

"""Faults of a move: a flipped bit, and an action in the middle of the pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.vram_io import thread_pool
from kybernate_shim.vram_io.thread_pool import CopyOptions

MIB = 1 << 20
SIZE = 8 * MIB
SMALL = CopyOptions(threads=2, piece_bytes=MIB)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def at_piece(monkeypatch: pytest.MonkeyPatch, number: int, action: object) -> None:
    """Do `action` before a thread pool's piece of that number."""
    assert callable(action)
    original, count = thread_pool._ThreadPool._next, [0]

    def counted(self: thread_pool._ThreadPool[object]) -> thread_pool.Piece[object] | None:
        piece = original(self)
        count[0] += 1
        if count[0] == number:
            action()
        return piece

    monkeypatch.setattr(thread_pool._ThreadPool, "_next", counted)

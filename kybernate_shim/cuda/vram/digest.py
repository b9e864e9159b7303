"""Digests of saved regions: a tree of two levels, so that threads can work on the pieces in any order.

A digest is a text, `xxh3-128-tree:<bytes of a piece>:<hex>`: the XXH3-128 of the XXH3-128s of the pieces, followed by
the size of the whole as eight bytes, little-endian. It depends on the content only, not on where the holes are. It
finds damage, not forgery: whoever can write the file can write its digest.
"""

from __future__ import annotations

from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING

from kybernate_shim.cuda.vram.errors import DigestMismatch

if TYPE_CHECKING:
    from pathlib import Path

    from kybernate_shim.cuda.vram.buffers import Buffer
    from kybernate_shim.cuda.vram.crew import Transfer

KIND = "xxh3-128-tree"
LEAF_BYTES = 16
MOST_PIECE_BYTES = 1 << 30  # a buffer of that size is allocated on the word of a manifest


class Tree:
    """The digest of `size` bytes in pieces of `piece_bytes`; each thread may add pieces of its own."""

    def __init__(self, size: int, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._size = size
        self._leaves = bytearray(LEAF_BYTES * -(-size // piece_bytes))

    def add(self, offset: int, data: memoryview) -> None:
        self._set(offset, _xxh3_128(data))

    def add_unless_zero(self, offset: int, data: memoryview) -> bool:
        """Do as `add`, and tell whether anything of the piece is not zero."""
        leaf = _xxh3_128(data)
        self._set(offset, leaf)
        return leaf != _of_zeros(len(data))

    def add_zeros(self, offset: int, size: int) -> None:
        self._set(offset, _of_zeros(size))

    def text(self) -> str:
        """Return the digest; every piece must have been added."""
        return self.text_of(0, self._size)

    def text_of(self, start: int, end: int) -> str:
        """Return the digest of a part that begins with a piece and ends with one; all of its pieces must be there."""
        first, behind = start // self.piece_bytes, -(-end // self.piece_bytes)
        leaves = bytes(self._leaves[first * LEAF_BYTES : behind * LEAF_BYTES])
        root = _xxh3_128(leaves + (end - start).to_bytes(8, "little"))
        return f"{KIND}:{self.piece_bytes}:{root.hex()}"

    def _set(self, offset: int, leaf: bytes) -> None:
        at = offset // self.piece_bytes * LEAF_BYTES
        self._leaves[at : at + LEAF_BYTES] = leaf


def piece_bytes_of(digest: str) -> int:
    """Return the piece size that a digest was made with. Raises DigestMismatch for a text of another kind."""
    kind, _, rest = digest.partition(":")
    size, _, root = rest.partition(":")
    sensible = size.isdecimal() and 0 < int(size) <= MOST_PIECE_BYTES and int(size) % 4096 == 0
    if kind != KIND or not sensible or len(root) != 2 * LEAF_BYTES:
        raise DigestMismatch(f"{digest!r} is no digest of a saved region; the image is damaged or too new")
    return int(size)


def of_file(path: Path, piece_bytes: int, how: Transfer) -> str:
    """Return the digest of a file, for verifying an image that nobody restores. Raises FileFailed and Cancelled."""
    from kybernate_shim.cuda.vram import crew, files  # here: of all that digests, only this needs threads and files

    with files.reading(path, how.direct) as file:
        tree = Tree(file.size, piece_bytes)

        def add(piece: crew.Piece[None], buffer: Buffer) -> int:
            if file.has_data(piece.offset, piece.size):
                file.read(piece.offset, buffer.view[: piece.size])
                tree.add(piece.offset, buffer.view[: piece.size])
            else:
                tree.add_zeros(piece.offset, piece.size)
            return piece.size

        crew.run(crew.pieces([(None, file.size, piece_bytes)]), add, how)
        return tree.text()


def check(file: str, found: str, expected: str) -> None:
    """Raise DigestMismatch unless the digest `found` is the one that is `expected`."""
    if found != expected:
        raise DigestMismatch(
            f"{file} does not hold the bytes that were saved ({found} instead of {expected}); "
            "the process that they were loaded into must not run"
        )


def _xxh3_128(data: memoryview | bytes) -> bytes:
    import xxhash  # here: only who moves VRAM needs it

    return xxhash.xxh3_128_digest(data)


@cache
def _of_zeros(size: int) -> bytes:
    with mmap(-1, size) as zeros, memoryview(zeros) as view:
        return _xxh3_128(view)

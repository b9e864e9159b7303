"""The digest of a whole file of saved regions, without a restore. Of all digests, only this one needs threads."""

from __future__ import annotations

from pathlib import Path

from kybernate_shim.vram_io.arrival import reading
from kybernate_shim.vram_io.buffers import Buffer
from kybernate_shim.vram_io.digest import Tree
from kybernate_shim.vram_io.thread_pool import CopyOptions, Piece, pieces, run


def of_file(path: Path, piece_bytes: int, how: CopyOptions) -> str:
    """Return the digest of a file, of the kind of `how`, without restoring it. Raises FileFailed and Cancelled."""
    with reading(path, how) as file:
        tree = Tree(file.size, piece_bytes, how.digest)

        def add(piece: Piece[None], buffer: Buffer) -> int:
            if (known := file.leaf(piece.offset, piece.size, how.digest)) is not None:
                tree.put(piece.offset, known)
            elif file.has_data(piece.offset, piece.size):
                file.read(piece.offset, buffer.view[: piece.size])
                tree.add(piece.offset, buffer.view[: piece.size])
            else:
                tree.add_zeros(piece.offset, piece.size)
            return piece.size

        run(pieces([(None, file.size, piece_bytes)]), add, how)
        return tree.text()

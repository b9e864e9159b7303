"""How the digest of a file is made, in each of the two forms that a manifest has.

Both are hashes of pieces, and a hash of these. The files of CRIU and of ours have the form of digests.py; files of VRAM
bytes have the one of vram_io/digest.py, in which the size of the pieces is part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kybernate_shim.checkpoint.image.digests import PIECE, STRONG, Hash, algorithm_of, joined, new_hash
from kybernate_shim.vram_io import digest as vram_digest

ALGORITHMS: Final = {vram_digest.KIND: "xxh128", vram_digest.STRONG: STRONG}  # of digests of VRAM


@dataclass(frozen=True)
class DigestForm:
    """Pieces of `piece_bytes`, each hashed with `algorithm`. `kind` is that of a digest of VRAM, else ""."""

    algorithm: str
    piece_bytes: int = PIECE
    kind: str = ""

    def new_hash(self) -> Hash:
        """Return the empty hash of a piece."""
        return new_hash(self.algorithm)

    def pieces(self, size: int) -> range:
        """Return where the pieces of a file of `size` bytes start."""
        return range(0, size if self.kind else max(1, size), self.piece_bytes)  # else an empty file is one empty piece

    def text(self, leaves: Sequence[bytes], size: int) -> str:
        """Return the digest of a file of `size` bytes by the hashes of its pieces."""
        if self.kind:
            return vram_digest.text_of_leaves(self.kind, self.piece_bytes, b"".join(leaves), size)
        return joined(self.algorithm, leaves)


def form_of(digest: str) -> DigestForm:
    """Return how `digest` was made. Raises FileUnreadable and VramError."""
    if not vram_digest.is_of_tree(digest):
        return DigestForm(algorithm_of(digest))
    kind = digest.partition(":")[0]
    return DigestForm(ALGORITHMS[kind], vram_digest.piece_bytes_of(digest), kind)


def strong_form_of(digest: str) -> DigestForm:
    """Return the same form with the algorithm that holds against a forger. Raises VramError."""
    if not vram_digest.is_of_tree(digest):
        return DigestForm(STRONG)
    return DigestForm(STRONG, vram_digest.piece_bytes_of(digest), vram_digest.STRONG)

"""Digests of saved regions: a tree of two levels, so that threads can work on the pieces in any order.

A digest is a text, `<kind>:<bytes of a piece>:<hex>`. With the kind `xxh3-128-tree` it is the XXH3-128 of the XXH3-128s
of the pieces, followed by the size of the whole as eight bytes, little-endian; with `blake3-tree` it is the same with
BLAKE3. It depends on the content only, not on where the holes are. The first is faster than memory and finds damage.
The second finds forgery, too, and is for images that leave the node.
"""

from __future__ import annotations

from functools import cache
from mmap import mmap

from kybernate_shim.vram_io.errors import VramError

KIND = "xxh3-128-tree"
STRONG = "blake3-tree"
LEAF_BYTES = {KIND: 16, STRONG: 32}
MOST_PIECE_BYTES = 1 << 30  # a buffer of that size is allocated because a manifest says so


class Tree:
    """The digest of `size` bytes in pieces of `piece_bytes`; each thread may add its own pieces."""

    def __init__(self, size: int, piece_bytes: int, kind: str = KIND) -> None:
        self.piece_bytes = piece_bytes
        self._size = size
        self._kind = kind
        self._leaf_bytes = LEAF_BYTES[kind]
        self._leaves = bytearray(self._leaf_bytes * -(-size // piece_bytes))

    def add(self, offset: int, data: memoryview) -> None:
        self.put(offset, leaf(self._kind, data))

    def add_unless_zero(self, offset: int, data: memoryview) -> bool:
        """Do as `add`, and return whether anything of the piece is not zero."""
        found = leaf(self._kind, data)
        self.put(offset, found)
        return found != _of_zeros(self._kind, len(data))

    def add_zeros(self, offset: int, size: int) -> None:
        self.put(offset, _of_zeros(self._kind, size))

    def put(self, offset: int, leaf: bytes) -> None:
        """Take over the digest of a piece."""
        at = offset // self.piece_bytes * self._leaf_bytes
        self._leaves[at : at + self._leaf_bytes] = leaf

    def text(self) -> str:
        """Return the digest; every piece must have been added."""
        return self.text_of(0, self._size)

    def text_of(self, start: int, end: int) -> str:
        """Return the digest of a part that begins with a piece and ends with one; all of its pieces must be there."""
        first, behind = start // self.piece_bytes, -(-end // self.piece_bytes)
        leaves = bytes(self._leaves[first * self._leaf_bytes : behind * self._leaf_bytes])
        return text_of_leaves(self._kind, self.piece_bytes, leaves, end - start)


def text_of_leaves(kind: str, piece_bytes: int, leaves: bytes, size: int) -> str:
    """Return the digest of `size` bytes by the digests of their pieces, joined in order."""
    root = leaf(kind, leaves + size.to_bytes(8, "little"))
    return f"{kind}:{piece_bytes}:{root.hex()}"


def tree_like(digest: str, size: int) -> Tree:
    """Return an empty tree of the kind and piece size of a digest. Raises VramError."""
    return Tree(size, piece_bytes_of(digest), digest.partition(":")[0])


def is_of_tree(digest: str) -> bool:
    """Return whether a digest has the form of this module.

    `blake3-tree:<hex>`, without the bytes of a piece, is that of a long file without VRAM; see
    checkpoint/image/digests.
    """
    kind = digest.partition(":")[0]
    return kind in LEAF_BYTES and (kind == KIND or digest.count(":") > 1)


def kind_of_blocks(digest: str, piece_bytes: int) -> str:
    """Return the kind of a digest of pieces of that size, "" for any other one."""
    kind, _, rest = digest.partition(":")
    return kind if kind in LEAF_BYTES and rest.partition(":")[0] == str(piece_bytes) else ""


def piece_bytes_of(digest: str) -> int:
    """Return the piece size that a digest was made with. Raises VramError for a text of another kind."""
    kind, _, rest = digest.partition(":")
    size, _, root = rest.partition(":")
    sensible = size.isdecimal() and 0 < int(size) <= MOST_PIECE_BYTES and int(size) % 4096 == 0
    if not sensible or len(root) != 2 * LEAF_BYTES.get(kind, 0):
        raise VramError(f"{digest!r} is not a digest of a saved region; the image is damaged or too new")
    return int(size)


def check(file: str, found: str, expected: str) -> None:
    """Raise VramError unless the digest `found` is the one that is `expected`."""
    if found != expected:
        raise VramError(
            f"{file} does not hold the bytes that were saved ({found} instead of {expected}); "
            "the process that they were loaded into must not run"
        )


def leaf(kind: str, data: memoryview | bytes) -> bytes:
    """Return the digest of a piece."""
    if kind == STRONG:
        from blake3 import blake3  # here: only processes that move VRAM need it

        return blake3(data).digest()
    import xxhash

    return xxhash.xxh3_128_digest(data)


@cache
def _of_zeros(kind: str, size: int) -> bytes:
    with mmap(-1, size) as zeros, memoryview(zeros) as view:
        return leaf(kind, view)

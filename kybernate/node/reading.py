"""Files of a checkpoint image that others may have written: opened once, without links, digested as they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.checkpoint.digests import PIECE, STRONG, Hash, algorithm_of, new_hash
from kybernate_shim.checkpoint.manifest import File
from kybernate_shim.cuda.vram import digest as vram_digest
from kybernate_shim.linux.plain_files import open_plain, read_plain

CHUNK = 1 << 20
LEAVES = {vram_digest.KIND: "xxh128", vram_digest.STRONG: STRONG}  # algorithms of digests of VRAM


class FileOdd(Exception):
    """A file is not what the manifest says, or changes while it is read. The message names it."""


@contextmanager
def opened(name: str, directory: int) -> Iterator[int]:
    """Give a descriptor of a regular file in a directory, for reading. Raises OSError."""
    fd = open_plain(name, directory=directory)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Give a descriptor of a directory that is no link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def read_listed(file: File, directory: int, *, most: int) -> bytes:
    """Return the content of a file of the manifest, which has its size and digest. Raises FileOdd, DigestUnknown, …"""
    if file.size > most:
        raise FileOdd(f"{file.name}: {file.size} bytes, at most {most} are accepted")
    content = read_plain(file.name, directory=directory, most=most)
    require_listed(file, content)
    return content


def require_listed(file: File, content: bytes) -> None:
    """Raise FileOdd unless `content` has the size and digest of the manifest."""
    digest = digest_for(file)
    digest.update(memoryview(content))
    require_same(file, len(content), digest.text())


def require_same(file: File, size: int, digest: str) -> None:
    """Raise FileOdd unless size and digest are those of the manifest."""
    if size != file.size:
        raise FileOdd(f"{file.name}: {size} bytes found, {file.size} expected")
    if digest != file.digest:
        raise FileOdd(f"{file.name}: digest {digest} found, {file.digest} expected")


def pieces_of(fd: int, name: str, size: int) -> Iterator[memoryview]:
    """Yield the `size` bytes of an open file. Raises FileOdd if it has another size, or changes it meanwhile."""
    buffer = memoryview(bytearray(CHUNK))
    done = 0
    while count := os.readv(fd, [buffer[: min(CHUNK, size + 1 - done)]]):
        done += count
        if done > size:
            break
        yield buffer[:count]
    if done != size:
        raise FileOdd(f"{name}: {'longer' if done > size else 'shorter'} than {size} bytes")


class StreamDigest:
    """The digest of bytes that come in order: pieces of a fixed size, and a digest of their digests."""

    def __init__(
        self, leaf: Callable[[], Hash], piece: int, text: Callable[[list[bytes], int], str], *, one: bool
    ) -> None:
        self._new, self._piece, self._text, self._one = leaf, piece, text, one
        self._hash, self._room, self._leaves, self._size = leaf(), piece, list[bytes](), 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        while data:
            if not self._room:
                self._finish_piece()
            part = data[: self._room]
            self._hash.update(part)
            self._room -= len(part)
            self._size += len(part)
            data = data[len(part) :]

    def text(self) -> str:
        """Return the digest; nothing may be added afterwards."""
        if self._room < self._piece or (self._one and not self._leaves):
            self._finish_piece()
        return self._text(self._leaves, self._size)

    def _finish_piece(self) -> None:
        self._leaves.append(self._hash.digest())
        self._hash, self._room = self._new(), self._piece


def digest_for(file: File) -> StreamDigest:
    """Return an empty digest of the kind that the manifest has of the file. Raises DigestUnknown and VramError."""
    if vram_digest.is_of_tree(file.digest):
        return _vram_digest(vram_digest.piece_bytes_of(file.digest), file.digest.partition(":")[0])
    return _plain_digest(algorithm_of(file.digest))


def strong_digest_for(file: File) -> StreamDigest:
    """Return an empty digest of the same form that holds against a forger. Raises VramError."""
    if vram_digest.is_of_tree(file.digest):
        return _vram_digest(vram_digest.piece_bytes_of(file.digest), vram_digest.STRONG)
    return _plain_digest(STRONG)


def _plain_digest(algorithm: str) -> StreamDigest:
    """Return an empty digest in the form of checkpoint/digests.py. Raises DigestUnknown."""

    def joined(leaves: list[bytes], size: int) -> str:
        if len(leaves) == 1:
            return f"{algorithm}:{leaves[0].hex()}"
        tree = new_hash(algorithm)
        tree.update(b"".join(leaves))
        return f"{algorithm}-tree:{tree.digest().hex()}"

    return StreamDigest(lambda: new_hash(algorithm), PIECE, joined, one=True)


def _vram_digest(piece: int, kind: str) -> StreamDigest:
    """Return an empty digest in the form of cuda/vram/digest.py."""
    algorithm = LEAVES[kind]

    def rooted(leaves: list[bytes], size: int) -> str:
        root = new_hash(algorithm)
        root.update(b"".join(leaves) + size.to_bytes(8, "little"))
        return f"{kind}:{piece}:{root.digest().hex()}"

    return StreamDigest(lambda: new_hash(algorithm), piece, rooted, one=False)

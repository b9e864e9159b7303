"""Files of a checkpoint image that others may have written: opened once, without links, digested as they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.checkpoint.image.digest_form import DigestForm, form_of, strong_form_of
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.manifest import File
from kybernate_shim.linux.plain_files import open_plain, read_plain

CHUNK = 1 << 20
OnProgress = Callable[[int, int], object]  # bytes done, and bytes in all


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
    """Return the content of a file of the manifest, which has its size and digest. Raises FileUnreadable, …"""
    if file.size > most:
        raise FileUnreadable(f"{file.name}: {file.size} bytes, at most {most} are accepted")
    content = read_plain(file.name, directory=directory, most=most)
    require_listed(file, content)
    return content


def require_listed(file: File, content: bytes) -> None:
    """Raise FileUnreadable unless `content` has the size and digest of the manifest."""
    digest = digest_for(file)
    digest.update(memoryview(content))
    require_same(file, len(content), digest.text())


def require_same(file: File, size: int, digest: str) -> None:
    """Raise FileUnreadable unless size and digest are those of the manifest."""
    if size != file.size:
        raise FileUnreadable(f"{file.name}: {size} bytes found, {file.size} expected")
    if digest != file.digest:
        raise FileUnreadable(f"{file.name}: digest {digest} found, {file.digest} expected")


def pieces_of(fd: int, name: str, size: int) -> Iterator[memoryview]:
    """Yield the `size` bytes of an open file. Raises FileUnreadable if it has another size, or changes it meanwhile."""
    buffer = memoryview(bytearray(CHUNK))
    done = 0
    while count := os.readv(fd, [buffer[: min(CHUNK, size + 1 - done)]]):
        done += count
        if done > size:
            break
        yield buffer[:count]
    if done != size:
        raise FileUnreadable(f"{name}: {'longer' if done > size else 'shorter'} than {size} bytes")


class StreamDigest:
    """The digest of bytes that come in order."""

    def __init__(self, form: DigestForm) -> None:
        self._form = form
        self._hash, self._room, self._leaves, self._size = form.new_hash(), form.piece_bytes, list[bytes](), 0

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
        if len(self._leaves) < len(self._form.pieces(self._size)):
            self._finish_piece()
        return self._form.text(self._leaves, self._size)

    def _finish_piece(self) -> None:
        self._leaves.append(self._hash.digest())
        self._hash, self._room = self._form.new_hash(), self._form.piece_bytes


def digest_for(file: File) -> StreamDigest:
    """Return an empty digest of the kind that the manifest has of the file. Raises FileUnreadable and VramError."""
    return StreamDigest(form_of(file.digest))


def strong_digest_for(file: File) -> StreamDigest:
    """Return an empty digest of the same form that holds against a forger. Raises VramError."""
    return StreamDigest(strong_form_of(file.digest))

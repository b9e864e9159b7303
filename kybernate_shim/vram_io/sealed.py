"""Files that cannot be read without a key, which is in memory alone: AES-256 in counter mode, by their offset.

A file has the size of what is in it, and holes where that is zero, in blocks of BLOCK_BYTES at multiples of it: those
are the units of reading and writing. Its integrity is proved by its digest, which is that of the plain bytes. A key is
for one file that is written once: it is derived from the directory's and the file's name.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate_shim.vram_io import files
from kybernate_shim.vram_io.buffers import Buffer, data_runs
from kybernate_shim.vram_io.files import RegionFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

KEY_BYTES: Final = 32
AES_BLOCK: Final = 16
SLACK: Final = AES_BLOCK - 1  # additional room that the library needs for its output


class SealedFile(RegionFile):
    """An open file whose bytes are encrypted as they are written. Any thread may call it, each has its own buffer."""

    def __init__(self, path: Path, fd: int, key: bytes) -> None:
        super().__init__(path, fd)
        self._key = blake2b(path.name.encode(), digest_size=KEY_BYTES, key=key).digest()
        self._own = threading.local()

    def write(self, offset: int, data: memoryview) -> None:
        room = self._room(len(data))
        self._cipher(offset).update_into(data, room)
        super().write(offset, room[: len(data)])

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`. A hole stands for zeros: an encrypted block never is one."""
        super().read(offset, into)
        room = self._room(len(into))
        for start, size in data_runs(ctypes.addressof(ctypes.c_char.from_buffer(into)), len(into)):
            self._cipher(offset + start).update_into(into[start : start + size], room)
            into[start : start + size] = room[:size]

    def _cipher(self, offset: int) -> CipherContext:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # few nodes park anything

        counter = (offset // AES_BLOCK).to_bytes(AES_BLOCK, "big")
        return Cipher(algorithms.AES(self._key), modes.CTR(counter)).encryptor()

    def _room(self, size: int) -> memoryview:
        """Return this thread's buffer, which suits direct I/O: it begins at a page."""
        buffer: Buffer | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer.view) < size + SLACK:
            buffer = self._own.buffer = Buffer(size + SLACK)
        return buffer.view


@contextmanager
def writing(path: Path, size: int, key: bytes) -> Iterator[RegionFile]:
    """Do as `files.writing`, for a file that is encrypted."""
    with files.writing(path, size) as file:
        yield SealedFile(path, file.fileno(), key)


@contextmanager
def reading(path: Path, key: bytes) -> Iterator[RegionFile]:
    """Do as `files.reading`, for a file that is encrypted."""
    with files.reading(path) as file:
        yield SealedFile(path, file.fileno(), key)

"""The form of an encrypted file of a checkpoint image: AES-256-GCM in chunks, bound to image, name and order.

A file begins with a header, followed by its chunks. Numbers are unsigned, big-endian.

    offset  bytes  content
    0       6      "KYBENC"
    6       2      version of this form, 1
    8       4      C: bytes of a chunk before encryption, 1 MiB
    12      8      S: bytes of the file before encryption
    20      16     file id: random, made for each writing of a file
    36      M      map, encrypted: one bit for each of the N = ceil(S / C) chunks, lowest bit of the first byte first;
                   0 for a chunk that is a hole, all zeros, which is not stored; M = ceil(N / 8), unused bits are 0
    36+M    16     tag of the map
    52+M           the chunks whose bit is 1, in order: C bytes, the last chunk of the file as many as are left,
                   each followed by its tag of 16 bytes

Nothing follows. The key of a file is HKDF-SHA256 (expansion) of the image's data key, with the file id, the image's
id and the file's name in `info`, so no two files share a key. A nonce is 4 bytes (0 for the map, 1 for a chunk) and 8
bytes (0, or the number of the chunk). The associated data of map and chunks are a label, the first 36 bytes of the
header, image id and name with their lengths, the number of the chunk, and a byte that is 1 for the last chunk.

So every change is found: of a bit, of the length, of the order of chunks, of holes, of the file's name, and the
exchange of files of two images or of two versions of one file. This is the STREAM construction (Hoang, Reyhanitabar,
Rogaway and Vizár, 2015) with random access. `cryptography` encrypts outside of the interpreter lock from its release 50
on; with VAES, one core does 9 GB/s.
"""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kybernate_shim.errors import Damaged

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK_BYTES: Final = 1 << 20
MOST_CHUNK_BYTES: Final = 16 << 20  # a buffer of that size is allocated because a header says so
MOST_CHUNKS: Final = 1 << 26  # 64 TiB; a map for so many is read because a header says so
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
SUFFIX: Final = ".enc"  # of an encrypted file's name in the image's directory
_MAGIC = b"KYBENC"
_VERSION = 1
_HEADER = struct.Struct(">6sHIQ16s")
_LABEL = b"kybernate encrypted file v1\0"
_KEY_LABEL = b"kybernate file key v1\0"
_MAP, _CHUNK = 0, 1


class EncryptionBroken(Damaged):
    """A file is not the one that was encrypted: it was changed, truncated, exchanged, or encrypted with another key."""


@dataclass(frozen=True)
class FileKey:
    """What encrypts one file: the image's data key, and what the file is bound to."""

    data_key: bytes = field(repr=False)
    image: str
    name: str

    def cipher(self, file_id: bytes) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 8 MiB that few containers need
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

        info = _KEY_LABEL + file_id + self.binding
        return AESGCM(HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=info).derive(self.data_key))

    @property
    def binding(self) -> bytes:
        words = (self.image.encode(errors="surrogateescape"), self.name.encode(errors="surrogateescape"))
        return b"".join(struct.pack(">I", len(word)) + word for word in words)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a file are. `data` are the numbers of the chunks that are stored, in order."""

    size: int
    chunk_bytes: int
    data: Sequence[int]

    @property
    def count(self) -> int:
        return chunk_count(self.size, self.chunk_bytes)

    @property
    def body(self) -> int:
        """Where the first chunk begins in the encrypted file."""
        return _HEADER.size + map_bytes(self.count) + TAG_BYTES

    @property
    def data_bytes(self) -> int:
        """Bytes before encryption that are stored."""
        last = self.length(self.data[-1]) - self.chunk_bytes if self.data else 0
        return len(self.data) * self.chunk_bytes + last

    @property
    def stored(self) -> int:
        """The size of the encrypted file."""
        return self.body + self.data_bytes + len(self.data) * TAG_BYTES

    def length(self, chunk: int) -> int:
        """Return the bytes of a chunk before encryption."""
        return min(self.chunk_bytes, self.size - chunk * self.chunk_bytes)

    def offset(self, chunk: int) -> int | None:
        """Return where a chunk is in the encrypted file, None for a hole."""
        rank = bisect_left(self.data, chunk)
        if rank == len(self.data) or self.data[rank] != chunk:
            return None
        return self.body + rank * (self.chunk_bytes + TAG_BYTES)

    def encoded_map(self) -> bytes:
        bits = bytearray(map_bytes(self.count))
        for chunk in self.data:
            bits[chunk >> 3] |= 1 << (chunk & 7)
        return bytes(bits)


def chunk_count(size: int, chunk_bytes: int) -> int:
    return -(-size // chunk_bytes)


def map_bytes(count: int) -> int:
    return -(-count // 8)


class Buffers:
    """Room for one chunk in both forms. Each thread has its own."""

    def __init__(self, chunk_bytes: int) -> None:
        self.plain = memoryview(bytearray(chunk_bytes))
        self.sealed = memoryview(bytearray(chunk_bytes + TAG_BYTES))


class _File:
    """What writer and reader share: the cipher of a file, and what its parts are bound to."""

    def __init__(self, fd: int, key: FileKey, header: bytes, file_id: bytes) -> None:
        self.fd = fd
        self.name = key.name
        self._cipher = key.cipher(file_id)
        self._bound = _LABEL + header + key.binding

    def _associated(self, chunk: int, *, last: bool) -> bytes:
        return self._bound + struct.pack(">QB", chunk, last)


class EncryptingFile(_File):
    """A file that is being encrypted from the descriptor `source`, whose size must not change, to the empty `target`.

    `begin` writes the header; then `encrypt` each chunk of `layout.data`, in any order and from any thread.
    """

    def __init__(self, source: int, target: int, key: FileKey, chunk_bytes: int = CHUNK_BYTES) -> None:
        size = os.fstat(source).st_size
        if chunk_count(size, chunk_bytes) > MOST_CHUNKS:
            raise OSError(f"{key.name}: a file of {size} bytes is too large to be encrypted")
        file_id = os.urandom(16)
        self._source = source
        self._header = _HEADER.pack(_MAGIC, _VERSION, chunk_bytes, size, file_id)
        self.layout = Layout(size, chunk_bytes, list(_data_chunks(source, size, chunk_bytes)))
        super().__init__(target, key, self._header, file_id)

    def begin(self) -> None:
        os.ftruncate(self.fd, self.layout.stored)
        sealed = self._cipher.encrypt(_nonce(_MAP, 0), self.layout.encoded_map(), self._associated(0, last=False))
        write_all(self.fd, memoryview(self._header + sealed), 0)

    def encrypt(self, chunk: int, buffers: Buffers) -> int:
        """Encrypt one chunk and return its bytes before. Raises OSError."""
        layout = self.layout
        length, offset = layout.length(chunk), layout.offset(chunk)
        assert offset is not None
        plain, sealed = buffers.plain[:length], buffers.sealed[: length + TAG_BYTES]
        if not _read(self._source, plain, chunk * layout.chunk_bytes):
            raise OSError(f"{self.name}: became shorter while it was being encrypted")
        associated = self._associated(chunk, last=chunk == layout.count - 1)
        self._cipher.encrypt_into(_nonce(_CHUNK, chunk), plain, associated, sealed)
        write_all(self.fd, sealed, offset)
        return length


class EncryptedFile(_File):
    """An encrypted file behind the descriptor `fd`. Its header is read and authenticated on construction.

    Its methods may be called from any thread. Raises EncryptionBroken and OSError.
    """

    def __init__(self, fd: int, key: FileKey) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise EncryptionBroken(f"{key.name}: not a plain file")
        header = bytearray(_HEADER.size)
        if not _read(fd, memoryview(header), 0):
            raise EncryptionBroken(f"{key.name}: truncated ({status.st_size} bytes hold no header)")
        magic, version, chunk_bytes, size, file_id = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise EncryptionBroken(f"{key.name}: not an encrypted file of a checkpoint image")
        if version != _VERSION:
            raise EncryptionBroken(f"{key.name}: version {version} is not supported, only {_VERSION} is")
        if not 0 < chunk_bytes <= MOST_CHUNK_BYTES or chunk_count(size, chunk_bytes) > MOST_CHUNKS:
            raise EncryptionBroken(f"{key.name}: {size} bytes in chunks of {chunk_bytes} are not possible")
        super().__init__(fd, key, bytes(header), file_id)
        self.layout = Layout(size, chunk_bytes, self._read_map(chunk_count(size, chunk_bytes)))
        if status.st_size != self.layout.stored:
            kind = "truncated" if status.st_size < self.layout.stored else "longer than written"
            raise EncryptionBroken(f"{key.name}: {kind} ({status.st_size} of {self.layout.stored} bytes)")

    def _read_map(self, count: int) -> list[int]:
        sealed = bytearray(map_bytes(count) + TAG_BYTES)
        if not _read(self.fd, memoryview(sealed), _HEADER.size):
            raise EncryptionBroken(f"{self.name}: truncated (the header is not whole)")
        bits = bytearray(map_bytes(count))
        self._open(_nonce(_MAP, 0), sealed, self._associated(0, last=False), bits, "the header")
        return [chunk for chunk in range(count) if bits[chunk >> 3] >> (chunk & 7) & 1]

    def decrypt(self, chunk: int, buffers: Buffers) -> memoryview:
        """Return the bytes of one chunk, which are in `buffers` until the next call."""
        layout = self.layout
        length, offset = layout.length(chunk), layout.offset(chunk)
        plain, sealed = buffers.plain[:length], buffers.sealed[: length + TAG_BYTES]
        if offset is None:
            plain[:] = bytes(length)
            return plain
        if not _read(self.fd, sealed, offset):
            raise EncryptionBroken(f"{self.name}: truncated while it was being read")
        associated = self._associated(chunk, last=chunk == layout.count - 1)
        self._open(_nonce(_CHUNK, chunk), sealed, associated, plain, f"chunk {chunk}")
        return plain

    def blocks(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `end` before encryption, in blocks that last until the next one."""
        buffers, size = self._buffers, self.layout.chunk_bytes
        for chunk in range(start // size, chunk_count(end, size)):
            plain, first = self.decrypt(chunk, buffers), chunk * size
            yield plain[max(0, start - first) : end - first]

    @property
    def _buffers(self) -> Buffers:
        return Buffers(min(self.layout.chunk_bytes, max(1, self.layout.size)))

    def _open(
        self, nonce: bytes, sealed: bytearray | memoryview, associated: bytes, plain: bytearray | memoryview, part: str
    ) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(nonce, sealed, associated, plain)
        except InvalidTag:
            raise EncryptionBroken(
                f"{self.name}: {part} was changed, or belongs to another file, or the key is another one"
            ) from None


@dataclass(frozen=True)
class WrappedKey:
    """A data key that only the node's key `key_id` opens. `wrapped` is hexadecimal: nonce, key and tag."""

    key_id: str
    wrapped: str


@dataclass(frozen=True)
class NodeKey:
    """A key of the node's file, which encrypts data keys and nothing else."""

    key: bytes = field(repr=False)

    @cached_property
    def id(self) -> str:
        from hashlib import sha256  # as in store.py

        return sha256(b"kybernate encryption key id v1\0" + self.key).hexdigest()[:16]

    def wrap(self, data_key: bytes, image: str) -> WrappedKey:
        nonce = os.urandom(12)
        sealed = self._cipher().encrypt(nonce, data_key, self._associated(image))
        return WrappedKey(self.id, (nonce + sealed).hex())

    def unwrap(self, wrapped: WrappedKey, image: str) -> bytes:
        """Return the data key of the image. Raises EncryptionBroken."""
        from cryptography.exceptions import InvalidTag

        try:
            sealed = bytes.fromhex(wrapped.wrapped)
            data_key = self._cipher().decrypt(sealed[:12], sealed[12:], self._associated(image))
        except (InvalidTag, ValueError):
            raise EncryptionBroken(f"the data key of image {image} was changed, or belongs to another image") from None
        if len(data_key) != KEY_BYTES:
            raise EncryptionBroken(f"the data key of image {image} has {len(data_key)} bytes, not {KEY_BYTES}")
        return data_key

    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.key)

    def _associated(self, image: str) -> bytes:
        return b"kybernate data key v1\0" + self.id.encode() + image.encode(errors="surrogateescape")


def new_data_key() -> bytes:
    return os.urandom(KEY_BYTES)


def _data_chunks(fd: int, size: int, chunk_bytes: int) -> Iterator[int]:
    """Yield the numbers of the chunks that are not entirely holes, in order. Source: lseek(2)."""
    following, offset = 0, 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        offset = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        first = max(following, start // chunk_bytes)
        following = chunk_count(offset, chunk_bytes)
        yield from range(first, following)


def _nonce(kind: int, number: int) -> bytes:
    return struct.pack(">IQ", kind, number)


def _read(fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer, and return whether the file has enough bytes."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of the file. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)

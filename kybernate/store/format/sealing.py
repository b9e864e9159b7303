"""What becomes of a chunk before it is stored, and back: named by its keyed digest, compressed, encrypted.

A stored chunk is a codec's number and what the codec made of it. Whatever was done, a chunk that is opened is compared
with its name, so a bit that has changed on the way is found here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import blake3

from kybernate.store.errors import ChunkDamaged
from kybernate.store.keys import StoreKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ID_BYTES = 32
NONCE_BYTES = 12
SAMPLE_BYTES = 64 << 10
WORTH = 0.90  # a sample that zstd leaves larger than that is stored as it is
DEFAULT_LEVEL = 3
ENCRYPTED = 0x80  # added to the codec's number


class Codec(IntEnum):
    """How the bytes of a chunk are stored."""

    RAW = 0
    ZSTD = 1


@dataclass(frozen=True)
class Sealed:
    """A chunk as it is stored. `codec` is a Codec, with ENCRYPTED added where it is encrypted."""

    id: bytes
    codec: int
    size: int  # before compression
    content: bytes | memoryview


def chunk_id(key: StoreKey, content: bytes | memoryview) -> bytes:
    """Return the name of a chunk: 32 bytes."""
    return blake3.blake3(content, key=key.names).digest()


def seal(key: StoreKey, id: bytes, content: bytes | memoryview, *, level: int = DEFAULT_LEVEL) -> Sealed:
    """Compress a chunk where a sample becomes smaller, and encrypt it where the store is encrypted.

    `level` is zstd's; 0 means never to compress. `content` must stay unchanged while the result is in use.
    """
    codec, body = int(Codec.RAW), content
    if level and _pays(content):
        packed = _compress(content, level)
        if len(packed) < len(content) * WORTH:
            codec, body = int(Codec.ZSTD), packed
    if key.encrypted:
        codec |= ENCRYPTED
        body = encrypt(key, bytes(body), _bound(id, codec))
    return Sealed(id, codec, len(content), body)


def unseal(key: StoreKey, sealed: Sealed) -> bytes | memoryview:
    """Return the bytes of a chunk, not copied where they are stored as they are.

    Raises ChunkDamaged where they are not those of its name.
    """
    body = sealed.content
    if sealed.codec & ENCRYPTED:
        opened = decrypt(key, body, _bound(sealed.id, sealed.codec))
        if opened is None:
            raise ChunkDamaged(f"chunk {sealed.id.hex()} was not encrypted with this store's key, or was changed")
        body = opened
    match sealed.codec & ~ENCRYPTED:
        case Codec.RAW:
            content: bytes | memoryview = body
        case Codec.ZSTD:
            content = _decompressed(sealed, body)
        case other:
            raise ChunkDamaged(f"chunk {sealed.id.hex()} has the unknown codec {other}")
    if chunk_id(key, content) != sealed.id:
        raise ChunkDamaged(f"chunk {sealed.id.hex()} has other content than when it was stored")
    return content


def _pays(content: bytes | memoryview) -> bool:
    """Return whether a sample from the middle becomes smaller."""
    middle = max(0, len(content) // 2 - SAMPLE_BYTES // 2)
    sample = content[middle : middle + SAMPLE_BYTES]
    return len(_compress(sample, 1)) < len(sample) * WORTH


def _compress(content: bytes | memoryview, level: int) -> bytes:
    import zstandard  # with the first chunk

    return zstandard.ZstdCompressor(level=level).compress(content)


def _decompressed(sealed: Sealed, body: bytes | memoryview) -> bytes:
    import zstandard

    try:
        # What a frame claims of its size would be allocated, so it must be what the index says.
        if zstandard.get_frame_parameters(body).content_size != sealed.size:
            raise ChunkDamaged(f"chunk {sealed.id.hex()} has another size than the index says, {sealed.size} bytes")
        content: bytes = zstandard.ZstdDecompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise ChunkDamaged(f"chunk {sealed.id.hex()} cannot be decompressed: {error}") from error
    return content


def encrypt(key: StoreKey, content: bytes, bound: bytes) -> bytes:
    """Return a nonce and the AES-256-GCM of `content`, bound to `bound`, which the reader must know."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, content, bound)


def decrypt(key: StoreKey, content: bytes | memoryview, bound: bytes) -> bytes | None:
    """Return what `encrypt` was given; None where it was changed, or bound to something else."""
    from cryptography.exceptions import InvalidTag

    try:
        return _cipher(key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], bound)
    except (InvalidTag, ValueError):
        return None


def _cipher(key: StoreKey) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.encryption)


def _bound(id: bytes, codec: int) -> bytes:
    """Return what the encryption binds a chunk to, besides its content."""
    return b"kybernate chunk v1\0" + id + bytes([codec])

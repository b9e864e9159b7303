"""An index: which chunks are in which packs, in one object, so that no pack has to be opened to find a chunk.

    offset  bytes  content
    0       8      "KYBINDX1"
    8              for each pack: its name (32 bytes), the number n of its chunks (4), and their table as in the pack
    end     32     keyed BLAKE3 of all before

An index says nothing that the packs do not say: it can be made again from them. Every upload adds one; a collection
merges them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import blake3

from kybernate.store.errors import StoreInvalid
from kybernate.store.format.pack import ENTRY, MOST_CHUNKS, Place, encode_places, places_of
from kybernate.store.keys import StoreKey

MAGIC = b"KYBINDX1"
PREFIX = "index"
HEAD = struct.Struct("<32sI")
DIGEST_BYTES = 32
MOST_BYTES = 256 << 20  # of an index: an upload's has 96 MiB at most


def encode(key: StoreKey, packs: Iterable[tuple[str, Iterable[Place]]]) -> bytes:
    """Return an index of packs and their places."""
    return encode_tables(key, ((name, encode_places(places)) for name, places in packs))


def encode_tables(key: StoreKey, packs: Iterable[tuple[str, bytes]]) -> bytes:
    """Return an index of packs and their tables."""
    content = bytearray(MAGIC)
    for name, table in packs:
        content += HEAD.pack(bytes.fromhex(name), len(table) // ENTRY.size) + table
    content += blake3.blake3(content, key=key.recipes).digest()
    return bytes(content)


def name_of(content: bytes) -> str:
    """Return the name of the object that holds an index: the same content is the same object."""
    return f"{PREFIX}/{content[-DIGEST_BYTES:].hex()}"


def decode(key: StoreKey, content: bytes) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Yield the packs of an index with their places. Raises StoreInvalid before the first, where it was changed."""
    return ((name, tuple(places_of(table))) for name, table in tables(key, content))


def tables(key: StoreKey, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the packs of an index with their tables; raises as `decode`."""
    body, digest = memoryview(content)[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if not content.startswith(MAGIC) or blake3.blake3(body, key=key.recipes).digest() != digest:
        raise StoreInvalid("an index was changed, was cut, or is of another key")
    position = len(MAGIC)
    while position < len(body):
        if position + HEAD.size > len(body):
            raise StoreInvalid("an index ends in the middle of a pack")
        name, count = HEAD.unpack_from(body, position)
        begin = position + HEAD.size
        position = begin + count * ENTRY.size
        if count > MOST_CHUNKS or position > len(body):
            raise StoreInvalid("an index ends in the middle of a pack")
        yield name.hex(), bytes(body[begin:position])

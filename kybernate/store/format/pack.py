"""A pack: many sealed chunks in one object, with a table of them at its end.

    offset    bytes  content (numbers: unsigned, little-endian)
    0         8      "KYBPACK1"
    8                the chunks as they are stored, one after the other
    T         48 n   the table: for each chunk its id (32 bytes), offset (8), stored bytes (4), and one number (4) with
                     the bytes before compression in the lower 24 bits and the codec in the upper 8
    T + 48 n  8      T
              4      n
              16     random
              32     keyed BLAKE3 of these random bytes and the table
              8      "KYBPEND1"

The name of a pack is that BLAKE3. No two uploads make a pack of the same name, even of the same chunks: a pack that was
deleted, or is about to be, never comes back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import blake3

from kybernate.store.errors import StoreInvalid
from kybernate.store.format.sealing import ID_BYTES, Sealed
from kybernate.store.keys import StoreKey

PREFIX = "packs"
MAGIC, END = b"KYBPACK1", b"KYBPEND1"
ENTRY = struct.Struct(f"<{ID_BYTES}sQII")
SALT_BYTES = 16
FOOTER = struct.Struct(f"<QI{SALT_BYTES}s{ID_BYTES}s8s")
PACK_BYTES = 32 << 20
MOST_BYTES = 2 * PACK_BYTES  # with its last chunk and its table
MOST_CHUNKS = 1 << 16  # of a pack, so that a footer cannot make its reader allocate more
SIZE_BITS = 24


class Place(NamedTuple):
    """Where a chunk is in a pack. `size` is before compression."""

    id: bytes
    offset: int
    stored: int
    size: int
    codec: int


@dataclass(frozen=True)
class Pack:
    """A complete pack."""

    name: str
    content: bytearray
    places: tuple[Place, ...]


class PackBuilder:
    """Collects chunks. `bytes` is what the pack has by now, without its table."""

    def __init__(self, key: StoreKey) -> None:
        self._key = key
        self._content = bytearray(MAGIC)
        self._places: list[Place] = []

    @property
    def bytes(self) -> int:
        return len(self._content)

    @property
    def full(self) -> bool:
        """Return whether the pack should be finished before another chunk is added."""
        return len(self._content) >= PACK_BYTES or len(self._places) >= MOST_CHUNKS

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, chunk: Sealed) -> None:
        """Append a chunk; its content is copied."""
        stored = len(chunk.content)
        self._places.append(Place(chunk.id, len(self._content), stored, chunk.size, chunk.codec))
        self._content += chunk.content

    def finish(self) -> Pack:
        """Return the pack. The builder must not be used afterwards."""
        table = encode_places(self._places)
        salt = os.urandom(SALT_BYTES)
        digest = _digest(self._key, salt, table)
        start = len(self._content)
        self._content += table
        self._content += FOOTER.pack(start, len(self._places), salt, digest, END)
        return Pack(digest.hex(), self._content, tuple(self._places))


def object_name(pack: str) -> str:
    """Return the name of the object that holds a pack."""
    return f"{PREFIX}/{pack[:2]}/{pack}"


def name_of(object: str) -> str:
    """Return the name of the pack in an object."""
    return object.rpartition("/")[2]


@dataclass(frozen=True)
class Footer:
    """Where the table of a pack is, and the random bytes in its name."""

    start: int
    length: int
    salt: bytes


def read_footer(size: int, footer: bytes) -> Footer:
    """Return the footer of a pack of `size` bytes from its last FOOTER.size bytes. Raises StoreInvalid."""
    if len(footer) != FOOTER.size or footer[-len(END) :] != END:
        raise StoreInvalid("not a pack, or one that was cut")
    start, count, salt, _, _ = FOOTER.unpack(footer)
    if count > MOST_CHUNKS or start + count * ENTRY.size + FOOTER.size != size:
        raise StoreInvalid(f"the footer of a pack of {size} bytes does not fit: table at {start}, {count} chunks")
    return Footer(start, count * ENTRY.size, salt)


def read_table(key: StoreKey, name: str, table: bytes, footer: Footer) -> tuple[Place, ...]:
    """Return the places of a pack from its table. Raises StoreInvalid where it was changed."""
    if _digest(key, footer.salt, table).hex() != name:
        raise StoreInvalid(f"the table of pack {name} was changed, or another key names its chunks")
    return tuple(_checked(name, place, footer.start) for place in places_of(table))


def _digest(key: StoreKey, salt: bytes, table: bytes) -> bytes:
    return blake3.blake3(salt + table, key=key.names).digest()


def encode_places(places: Iterable[Place]) -> bytes:
    """Return places as a table has them."""
    return b"".join(map(_entry, places))


def places_of(table: bytes) -> Iterator[Place]:
    """Yield the places of a table, unchecked."""
    for id, offset, stored, packed in ENTRY.iter_unpack(table):
        yield Place(id, offset, stored, packed & ((1 << SIZE_BITS) - 1), packed >> SIZE_BITS)


def _entry(place: Place) -> bytes:
    return ENTRY.pack(place.id, place.offset, place.stored, place.codec << SIZE_BITS | place.size)


def _checked(name: str, place: Place, end: int) -> Place:
    if place.offset < len(MAGIC) or place.offset + place.stored > end:
        raise StoreInvalid(f"pack {name}: a chunk at {place.offset} reaches beyond the chunks")
    return place

"""Indexes are replaced: those that name packs that are gone, and many small ones by few.

An index is a convenience: what it lacks is taken from the packs, and packs that it names in excess are not relied on
before they have been listed. So replacements need no lock, and one that dies in the middle leaves both sides.
"""

from __future__ import annotations

from collections.abc import Collection

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.objects import Stored

MOST_SMALL = 16  # indexes, before they are joined
SMALL_BYTES = 1 << 20
LARGE_BYTES = 8 << 20  # an index that is written has about as much


async def replace(store: ChunkStore, gone: Collection[str]) -> None:
    """Write indexes without the packs in `gone` in place of those that name them, and join small ones."""
    found = [stored async for stored in store.objects.list(indexes.PREFIX)]
    small = sum(stored.size < SMALL_BYTES for stored in found)
    if not gone and small <= MOST_SMALL:
        return
    replacement = _Replacement(store)
    for stored in found:
        tables = await _tables(store, stored)
        if any(pack in gone for pack in tables) or (tables and stored.size < SMALL_BYTES and small > MOST_SMALL):
            replacement.old.append(stored.name)
            await replacement.take({pack: table for pack, table in tables.items() if pack not in gone})
    await replacement.finish()


class _Replacement:
    """Indexes on their way: the new ones are there before the old ones go."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._tables: dict[str, bytes] = {}
        self._new: set[str] = set()
        self.old: list[str] = []

    async def take(self, tables: dict[str, bytes]) -> None:
        self._tables |= tables
        if sum(map(len, self._tables.values())) >= LARGE_BYTES:
            await self._write()

    async def finish(self) -> None:
        await self._write()
        await self._store.objects.delete([name for name in self.old if name not in self._new])

    async def _write(self) -> None:
        if self._tables:
            content = indexes.encode_tables(self._store.key, sorted(self._tables.items()))
            name = indexes.name_of(content)
            await self._store.objects.put(name, content)
            self._new.add(name)
            self._tables = {}


async def _tables(store: ChunkStore, stored: Stored) -> dict[str, bytes]:
    """Return the tables of an index by their packs."""
    try:
        return dict(indexes.tables(store.key, await store.objects.get(stored.name, most=indexes.MOST_BYTES)))
    except ObjectMissing:
        return {}  # another collection has just replaced it
    except StoreInvalid:
        return {}  # what it may say, the packs say

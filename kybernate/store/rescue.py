"""Copies chunks, as they are stored, from condemned packs to new ones, so that the condemned ones may go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format.pack import MOST_BYTES, PackBuilder, Place, object_name
from kybernate.store.format.sealing import Sealed, unseal


async def rescue(store: ChunkStore, chunks: Iterable[tuple[str, Place]]) -> int:
    """Copy chunks, and return how many; what is damaged stays where it is. `chunks` are sorted by their packs."""
    builder, copied = PackBuilder(store.key), 0
    for pack, places in groupby(chunks, key=itemgetter(0)):
        for sealed in await _sealed(store, pack, [place for _, place in places]):
            builder.add(sealed)
            copied += 1
            if builder.full:
                await _send(store, builder)
                builder = PackBuilder(store.key)
    if builder:
        await _send(store, builder)
    return copied


async def _sealed(store: ChunkStore, pack: str, places: list[Place]) -> list[Sealed]:
    """Return the chunks of a pack that are whole."""
    try:
        content = memoryview(await store.objects.get(object_name(pack), most=MOST_BYTES))
    except ObjectMissing:
        return []  # another collection has copied them, and deleted it
    except StoreInvalid:
        return []  # not a pack
    return await asyncio.to_thread(lambda: list(_whole(store, content, places)))


def _whole(store: ChunkStore, content: memoryview, places: Iterable[Place]) -> Iterator[Sealed]:
    for place in places:
        stored = content[place.offset : place.offset + place.stored]
        sealed = Sealed(place.id, place.codec, place.size, stored)
        try:
            unseal(store.key, sealed)
        except ChunkDamaged:
            continue
        yield sealed


async def _send(store: ChunkStore, builder: PackBuilder) -> None:
    pack = builder.finish()
    await store.objects.put(object_name(pack.name), pack.content)
    content = indexes.encode(store.key, [(pack.name, pack.places)])
    await store.objects.put(indexes.name_of(content), content)

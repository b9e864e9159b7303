"""Which packs the images of a store need, asked of the index's database: few ids of chunks are in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ImageNotStored
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe

PARALLEL = 4  # recipes that are in memory
NOTED_CHUNKS = 1 << 17  # ids in memory; together, in their order, they cost less than each image's own
Report = Callable[[int, int], object]

SCHEMA = """
DROP TABLE IF EXISTS temp.live;
DROP TABLE IF EXISTS temp.candidate;
DROP TABLE IF EXISTS temp.stranded;
CREATE TEMP TABLE live (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE candidate (number INTEGER PRIMARY KEY, rank INTEGER NOT NULL);
CREATE TEMP TABLE stranded (id BLOB NOT NULL, rank INTEGER NOT NULL);
"""
CANDIDATE = "INSERT INTO candidate SELECT number, ? FROM pack WHERE name = ?"
LIVE = "SELECT id FROM live ORDER BY id"
BEST = "SELECT id, min(rank) FROM chunk CROSS JOIN candidate ON number = pack GROUP BY id ORDER BY id"
STRANDED = """SELECT name, offset, stored, size, codec, chunk.id FROM stranded JOIN candidate USING (rank)
            JOIN pack USING (number) JOIN chunk ON chunk.id = stranded.id AND chunk.pack = number
            ORDER BY name, offset"""


@dataclass
class Reached:
    """What the images need. `packs` holds a copy of each chunk; those of `stranded` are in condemned packs alone."""

    images: int = 0
    chunks: int = 0
    missing: int = 0
    packs: frozenset[str] = frozenset()
    stranded: int = 0


async def reach(
    store: ChunkStore,
    packs: Iterable[str],
    condemned: Collection[str],
    *,
    report: Report = lambda done, total: None,
) -> Reached:
    """Find out which of `packs` are needed. A recipe that cannot be read raises StoreInvalid.

    Of a chunk in several packs, the one that is not condemned and whose name is first counts.
    """
    found = Reached()
    ranked = sorted(packs, key=lambda name: (name in condemned, name))
    reliable = sum(name not in condemned for name in ranked)
    await asyncio.to_thread(_prepare, store, ranked)
    ids = set[bytes]()
    async for recipe in recipes(store, report=report):
        found.images += 1
        ids |= recipe.chunks()
        if len(ids) >= NOTED_CHUNKS:
            await asyncio.to_thread(_note, store, ids)
            ids = set()
    await asyncio.to_thread(_note, store, ids)
    await asyncio.to_thread(_ask, store, ranked, reliable, found)
    return found


async def recipes(store: ChunkStore, *, report: Report = lambda done, total: None) -> AsyncIterator[Recipe]:
    """Yield all recipes, a few of them in memory at a time; `report` gets how many are done, and of how many."""
    names = [stored.name async for stored in store.images()]
    for begin in range(0, len(names), PARALLEL):
        report(begin, len(names))
        for recipe in await asyncio.gather(*(_recipe(store, name) for name in names[begin : begin + PARALLEL])):
            if recipe is not None:
                yield recipe
    report(len(names), len(names))


def stranded(store: ChunkStore) -> Iterator[tuple[str, Place]]:
    """Return where the chunks are that only condemned packs hold. Called after `reach`."""
    with store.index.connection() as database:
        rows = database.execute(STRANDED).fetchall()
    return ((name, Place(id, offset, stored, size, codec)) for name, offset, stored, size, codec, id in rows)


async def _recipe(store: ChunkStore, name: str) -> Recipe | None:
    try:
        return await store.recipe_of(name)
    except ImageNotStored:
        return None  # removed since it was listed


def _prepare(store: ChunkStore, ranked: list[str]) -> None:
    with store.index.connection() as database:
        database.executescript(SCHEMA)
        database.execute("BEGIN")
        database.executemany(CANDIDATE, enumerate(ranked))
        database.execute("COMMIT")


def _note(store: ChunkStore, ids: Iterable[bytes]) -> None:
    with store.index.connection() as database:
        database.execute("BEGIN")
        # In their order: neighbours are on one page of the table.
        database.executemany("INSERT OR IGNORE INTO live VALUES (?)", zip(sorted(ids), strict=True))
        database.execute("COMMIT")


def _ask(store: ChunkStore, ranked: list[str], reliable: int, found: Reached) -> None:
    counts = Counter[int | None]()
    with store.index.connection() as database:
        database.execute("BEGIN")
        for id, rank in _chosen(database):
            counts[rank] += 1
            if rank is not None and rank >= reliable:
                database.execute("INSERT INTO stranded VALUES (?, ?)", (id, rank))
                found.stranded += 1
        database.execute("COMMIT")
    found.chunks = counts.total()
    found.missing = counts.pop(None, 0)
    found.packs = frozenset(ranked[rank] for rank in counts if rank is not None)


def _chosen(database: sqlite3.Connection) -> Iterator[tuple[bytes, int | None]]:
    """Yield the chunks that images need, each with the rank of the pack that counts, None where it is missing.

    Both tables are read once, in the order of ids: to seek each id costs more with each chunk of the store.
    """
    copies = iter(database.execute(BEST))
    copy = next(copies, None)
    for (id,) in database.execute(LIVE):
        while copy is not None and copy[0] < id:
            copy = next(copies, None)
        yield id, copy[1] if copy is not None and copy[0] == id else None

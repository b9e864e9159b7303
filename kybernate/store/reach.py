"""Which packs the images of a store need, asked of the index's database: few ids of chunks are in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kybernate.node.failure import NoImage
from kybernate.store.chunkstore import Broken, ChunkStore
from kybernate.store.errors import StoreInvalid
from kybernate.store.format import recipe as recipe_format
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe
from kybernate.store.objects import Stored

PARALLEL = 4  # recipes that are in memory, of LARGE_BYTES together or one
LARGE_BYTES = 64 << 20
NOTED_CHUNKS = 1 << 17  # ids in memory; together, in their order, they cost less than each image's own
Report = Callable[[int, int], object]

SCHEMA = """
DROP TABLE IF EXISTS temp.live;
DROP TABLE IF EXISTS temp.candidate;
DROP TABLE IF EXISTS temp.stranded;
DROP TABLE IF EXISTS temp.lost;
CREATE TEMP TABLE live (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE candidate (number INTEGER PRIMARY KEY, rank INTEGER NOT NULL);
CREATE TEMP TABLE stranded (id BLOB NOT NULL, rank INTEGER NOT NULL);
CREATE TEMP TABLE lost (id BLOB PRIMARY KEY) WITHOUT ROWID;
"""
CANDIDATE = "INSERT INTO candidate SELECT number, ? FROM pack WHERE name = ?"
LIVE = "SELECT id FROM live ORDER BY id"
BEST = "SELECT id, min(rank) FROM chunk CROSS JOIN candidate ON number = pack GROUP BY id ORDER BY id"
STRANDED = """SELECT name, offset, stored, size, codec, chunk.id FROM stranded JOIN candidate USING (rank)
            JOIN pack USING (number) JOIN chunk ON chunk.id = stranded.id AND chunk.pack = number
            ORDER BY name, offset"""


@dataclass
class Reached:
    """What the images need. `packs` holds a copy of each chunk; those of `stranded` are in condemned packs alone.

    `missing` chunks are in none of the packs. `broken` are objects that hold no recipe where one belongs, and why.
    """

    images: int = 0
    chunks: int = 0
    missing: int = 0
    packs: frozenset[str] = frozenset()
    stranded: int = 0
    broken: dict[str, str] = field(default_factory=dict)


async def reach(
    store: ChunkStore,
    packs: Iterable[str],
    condemned: Collection[str],
    *,
    report: Report = lambda done, total: None,
) -> Reached:
    """Find out which of `packs` are needed.

    Of a chunk in several packs, the one that is not condemned and whose name is first counts.
    """
    found = Reached()
    ranked = sorted(packs, key=lambda name: (name in condemned, name))
    reliable = sum(name not in condemned for name in ranked)
    await asyncio.to_thread(_prepare, store, ranked)
    ids = set[bytes]()
    async for recipe in recipes(store, report=report, broken=found.broken.__setitem__):
        found.images += 1
        ids |= recipe.chunks()
        if len(ids) >= NOTED_CHUNKS:
            await asyncio.to_thread(_note, store, ids)
            ids = set()
    await asyncio.to_thread(_note, store, ids)
    await asyncio.to_thread(_ask, store, ranked, reliable, found)
    return found


async def lacking(store: ChunkStore, packs: Collection[str]) -> dict[str, int]:
    """Return the images of which chunks are in none of `packs` either, with how many. Called after `reach`.

    `packs` were listed after the recipes: what has been written, or copied from pack to pack, meanwhile is in them.
    """
    with store.index.connection() as database:
        ids = {id for (id,) in database.execute("SELECT id FROM lost")}
    gone = await asyncio.to_thread(lambda: {id for id in ids if store.index.find(id, packs.__contains__) is None})
    found: dict[str, int] = {}
    if not gone:
        return found
    async for recipe in recipes(store):
        if count := len(recipe.chunks() & gone):
            found[recipe_format.object_name(recipe.namespace, recipe.id)] = count
    return found


async def recipes(
    store: ChunkStore, *, report: Report = lambda done, total: None, broken: Broken = lambda name, why: None
) -> AsyncIterator[Recipe]:
    """Yield all recipes, a few of them in memory at a time; `report` gets how many are done, and of how many.

    `broken` gets the objects that hold none, and why.
    """
    found, done = await _listed(store), 0
    for some in _batches(found):
        report(done, len(found))
        done += len(some)
        for recipe in await asyncio.gather(*(_recipe(store, one.name, broken) for one in some)):
            if recipe is not None:
                yield recipe
    report(len(found), len(found))


async def _listed(store: ChunkStore) -> list[Stored]:
    """Return the objects of all recipes, listed twice by different requests: what is left out would be lost."""
    found = {stored.name: stored async for stored in store.images()}
    for namespace in await store.objects.folders(recipe_format.PREFIX):
        found |= {stored.name: stored async for stored in store.images(namespace)}
    return [found[name] for name in sorted(found)]


def _batches(found: Iterable[Stored]) -> Iterator[list[Stored]]:
    batch: list[Stored] = []
    for one in found:
        if batch and (len(batch) == PARALLEL or sum(two.size for two in batch) + one.size > LARGE_BYTES):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def stranded(store: ChunkStore) -> Iterator[tuple[str, Place]]:
    """Return where the chunks are that only condemned packs hold. Called after `reach`."""
    with store.index.connection() as database:
        rows = database.execute(STRANDED).fetchall()
    return ((name, Place(id, offset, stored, size, codec)) for name, offset, stored, size, codec, id in rows)


async def _recipe(store: ChunkStore, name: str, broken: Broken) -> Recipe | None:
    try:
        return await store.recipe_of(name)
    except NoImage:
        return None  # removed since it was listed
    except StoreInvalid as error:
        broken(name, str(error))
        return None


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
            if rank is None:
                database.execute("INSERT INTO lost VALUES (?)", (id,))
            elif rank >= reliable:
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

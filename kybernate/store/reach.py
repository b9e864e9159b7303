"""Which packs the images of a store need, asked of the index's database: no id of a chunk stays in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ImageNotStored
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe

PARALLEL = 4  # recipes that are in memory
Report = Callable[[int, int], object]

SCHEMA = """
DROP TABLE IF EXISTS temp.live;
DROP TABLE IF EXISTS temp.candidate;
CREATE TEMP TABLE live (id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE candidate (number INTEGER PRIMARY KEY, rank INTEGER NOT NULL);
"""
CANDIDATE = "INSERT INTO candidate SELECT number, ? FROM pack WHERE name = ?"
CHOSEN = """SELECT min(rank) AS rank, live.id AS id FROM live JOIN chunk ON chunk.id = live.id
            JOIN candidate ON number = pack GROUP BY live.id"""
STRANDED = f"""SELECT name, offset, stored, size, codec, chosen.id FROM ({CHOSEN}) AS chosen
            JOIN candidate ON candidate.rank = chosen.rank JOIN pack ON pack.number = candidate.number
            JOIN chunk ON chunk.id = chosen.id AND chunk.pack = pack.number WHERE chosen.rank >= ?
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
    async for recipe in recipes(store, report=report):
        found.images += 1
        await asyncio.to_thread(_note, store, recipe)
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


def stranded(store: ChunkStore, packs: Iterable[str], condemned: Collection[str]) -> Iterator[tuple[str, Place]]:
    """Return where the chunks are that only condemned packs hold. Called after `reach`."""
    reliable = sum(name not in condemned for name in packs)
    with store.index.connection() as database:
        rows = database.execute(STRANDED, (reliable,)).fetchall()
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


def _note(store: ChunkStore, recipe: Recipe) -> None:
    with store.index.connection() as database:
        database.execute("BEGIN")
        ids = sorted(recipe.chunks())  # neighbours are on one page of the table
        database.executemany("INSERT OR IGNORE INTO live VALUES (?)", ((id,) for id in ids))
        database.execute("COMMIT")


def _ask(store: ChunkStore, ranked: list[str], reliable: int, found: Reached) -> None:
    with store.index.connection() as database:
        (found.chunks,) = database.execute("SELECT count(*) FROM live").fetchone()
        counts = dict(database.execute(f"SELECT rank, count(*) FROM ({CHOSEN}) GROUP BY rank").fetchall())
    found.packs = frozenset(ranked[rank] for rank in counts)
    found.missing = found.chunks - sum(counts.values())
    found.stranded = sum(count for rank, count in counts.items() if rank >= reliable)

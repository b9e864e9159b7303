"""Collection: finds packs that no image needs, and removes them, while others write to the same store.

Two phases, in different runs. The first notes packs that no recipe reaches (notes.py). The second deletes those that
were noted at least `grace` before, are still not reached, and that no writer can rely on. Why that is safe, with any
number of writers and collections, whatever dies or is late, and with any clock:

- No pack's name comes twice, and a pack that was noted stays noted until it is gone. Writers and collections rely on
  packs alone that they found there and not noted. So a deletion that was right once is right at any later time.
- A writer that began before a note may not know of it. They are in the note, and the pack stays while one lives.
- A writer that is taken for dead is ended before the recipes are read, and cannot publish then (lease.py).
- Chunks of images that only noted packs hold are copied to a new pack before the noted ones may go.
- A collection that lacks a chunk of any image, or cannot read a recipe or a note, notes and deletes no pack, and says
  what it is:
  either the store is damaged, or the service does not show all that it has.

Times are the service's, and only decide how long packs are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from kybernate.store import lease, notes
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format.pack import MOST_BYTES, PackBuilder, Place, object_name
from kybernate.store.format.sealing import Sealed, unseal
from kybernate.store.merging import replace
from kybernate.store.notes import Note
from kybernate.store.objects import Stored
from kybernate.store.reach import Reached, Report, lacking, reach, stranded

GRACE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class World:
    """What a collection decides by. Times are the service's, in seconds since 1970; packs by their names."""

    now: float
    packs: Mapping[str, float]  # when each was written
    reached: frozenset[str]  # that hold a chunk of a recipe
    condemned: Mapping[str, float]  # when each was noted
    held: frozenset[str]  # condemned ones that a living writer may rely on
    leases: tuple[float, ...]  # when each living one began


@dataclass(frozen=True)
class Plan:
    """What a collection does: packs to delete, and to note."""

    delete: tuple[str, ...]
    condemn: tuple[str, ...]


@dataclass
class Collected:
    """What a collection has found and done. `rescued_chunks` were in condemned packs, and are in a new one now.

    `problems` are sentences. Where there is one, nothing was noted, copied or deleted.
    """

    images: int = 0
    chunks: int = 0
    packs: int = 0
    deleted_packs: int = 0
    deleted_bytes: int = 0
    condemned_packs: int = 0
    condemned_bytes: int = 0
    missing_chunks: int = 0
    rescued_chunks: int = 0
    unread_packs: int = 0
    problems: list[str] = field(default_factory=list)


def decide(world: World, *, grace: float = GRACE_SECONDS) -> Plan:
    """Return what is to be done. Without I/O.

    A young pack is not noted: its recipe may be to come. That saves work, and nothing depends on it.
    """
    oldest = min(world.leases, default=world.now)
    unreached = [pack for pack in sorted(world.packs) if pack not in world.reached]
    delete = [
        pack
        for pack in unreached
        if pack in world.condemned and pack not in world.held and world.now - world.condemned[pack] >= grace
    ]
    condemn = [
        pack
        for pack in unreached
        if pack not in world.condemned and world.packs[pack] < oldest and world.now - world.packs[pack] >= grace
    ]
    return Plan(tuple(delete), tuple(condemn))


async def collect(
    store: ChunkStore,
    *,
    grace: float = GRACE_SECONDS,
    dry_run: bool = False,
    report: Report = lambda done, total: None,
) -> Collected:
    """Run a collection. With `dry_run`, nothing is changed; `report` gets images looked at and in total."""
    # The order matters: notes, packs, writers, recipes. Each is read after what it is compared with was settled.
    noted = await notes.read(store.objects)
    condemned = notes.condemned(noted)
    packs = await store.packs()
    now = await store.now()
    writers = await lease.living(store.objects, now, end=not dry_run)
    await store.refresh()
    unread = await store.complete(packs)
    found = await reach(store, packs, condemned, report=report)
    done = Collected(found.images, found.chunks, len(packs), unread_packs=len(unread))
    done.problems += notes.problems(noted) + await _problems(store, found, done)
    if done.problems:
        return done
    held = notes.held(noted, writers)
    written = {name: one.modified for name, one in packs.items()}
    plan = decide(World(now, written, found.packs, condemned, held, tuple(writers.values())), grace=grace)
    done.deleted_packs, done.deleted_bytes = len(plan.delete), _bytes(packs, plan.delete)
    done.condemned_packs, done.condemned_bytes = len(plan.condemn), _bytes(packs, plan.condemn)
    if not dry_run:
        if found.stranded:
            done.rescued_chunks = await rescue(store, stranded(store))
        await _carry_out(store, plan, noted, packs)
    return done


async def _problems(store: ChunkStore, found: Reached, done: Collected) -> list[str]:
    """Return what is missing, or cannot be read, of images; counts the chunks."""
    problems = [f"{name} cannot be read: {why}" for name, why in sorted(found.broken.items())]
    if found.missing:
        there = await store.packs()
        await store.refresh()
        await store.complete(there)
        for name, chunks in sorted((await lacking(store, there)).items()):
            done.missing_chunks += chunks
            problems.append(f"{name} lacks {chunks} chunks, which are in no pack")
    return problems


async def _carry_out(store: ChunkStore, plan: Plan, noted: Iterable[Note], packs: Iterable[str]) -> None:
    """First the index forgets the packs, then they go: a reader that still knows them asks again."""
    await notes.complete(store.objects, noted)
    await notes.condemn(store.objects, plan.condemn)
    await replace(store, {*plan.delete, *await _absent(store, packs)})
    await store.objects.delete([object_name(pack) for pack in plan.delete])
    left = frozenset(packs) - frozenset(plan.delete)
    await store.objects.delete([note.name for note in noted if not note.packs & left])


async def _absent(store: ChunkStore, packs: Iterable[str]) -> frozenset[str]:
    """Return packs that an index names and that are gone, as after a collection that died, or was overtaken."""
    suspected = store.index.packs() - frozenset(packs)
    return suspected - (await store.packs()).keys() if suspected else suspected


def _bytes(packs: Mapping[str, Stored], names: Iterable[str]) -> int:
    return sum(packs[name].size for name in names)


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

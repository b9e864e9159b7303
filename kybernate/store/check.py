"""Compares what a store says with what it holds: recipes, index, packs, and with `read` every chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format.pack import MOST_BYTES, Place, object_name
from kybernate.store.format.recipe import Recipe
from kybernate.store.format.sealing import Sealed, unseal
from kybernate.store.named import names
from kybernate.store.probe import probe

PARALLEL = 8


@dataclass
class Checked:
    """What was found. `problems` are sentences; `damaged` names images that cannot be restored, with why.

    `service` is what the service lacks, a sentence each.
    """

    images: int = 0
    packs: int = 0
    pack_bytes: int = 0
    chunks: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    unindexed: list[str] = field(default_factory=list)  # packs that no index names
    service: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether an image, or anything that one may need, is damaged. What a service lacks is no damage."""
        return bool(self.damaged or self.problems)

    @property
    def verdict(self) -> str:
        """The worst that was found, in words."""
        if self.damaged:
            return f"damaged: {len(self.damaged)} of {self.images} images cannot be restored"
        if self.problems:
            return f"damaged: no image, but {len(self.problems)} packs or indexes"
        return f"whole: {self.images} images"


async def check(
    store: ChunkStore,
    *,
    read: bool = False,
    repair: bool = False,
    report: Callable[[int, int], object] = lambda a, b: None,
    fault_of: Callable[[Recipe], str] = lambda recipe: "",
) -> Checked:
    """Check a store; with `read`, every chunk is compared with its name; `report` gets packs done and in total.

    `fault_of` says what is wrong with the manifest in a recipe, "" for nothing.

    With `repair`, packs that no index names are indexed. Nothing of the store is ever removed here.
    """
    found = Checked(service=await probe(store.objects))
    await store.reload()
    found.problems += [f"{name}: {why}" for name, why in sorted(store.index.broken.items())]
    packs = {one.name.rpartition("/")[2]: one.size async for one in store.objects.list("packs")}
    found.packs, found.pack_bytes = len(packs), sum(packs.values())
    bad = await _packs(store, packs, found, read=read, report=report)
    if repair and found.unindexed:
        await _index(store, [pack for pack in found.unindexed if pack not in bad])
    await _images(store, packs, bad, found, fault_of)
    found.chunks = store.index.count()
    return found


async def _packs(
    store: ChunkStore, packs: dict[str, int], found: Checked, *, read: bool, report: Callable[[int, int], object]
) -> dict[str, set[bytes]]:
    """Return the chunks that cannot be read, by pack; of a pack that is damaged as a whole, all."""
    bad: dict[str, set[bytes]] = {}
    slots = asyncio.Semaphore(PARALLEL)
    done = 0

    async def one(pack: str) -> None:
        nonlocal done
        async with slots:
            try:
                places = await store.table_of(pack)
                broken = await _read(store, pack, places) if read else set()
            except (StoreInvalid, ObjectMissing) as error:
                bad[pack] = set()
                found.problems.append(f"pack {pack}: {error}")
                return
            finally:
                done += 1
                report(done, len(packs))
        if broken:
            bad[pack] = broken
            found.problems.append(f"pack {pack}: {len(broken)} of {len(places)} chunks are damaged")
        if not store.index.knows(pack):
            found.unindexed.append(pack)

    await asyncio.gather(*map(one, packs))
    return bad


async def _read(store: ChunkStore, pack: str, places: tuple[Place, ...]) -> set[bytes]:
    content = memoryview(await store.objects.get(object_name(pack), most=MOST_BYTES))
    return await asyncio.to_thread(lambda: {place.id for place in places if not _is_whole(store, content, place)})


def _is_whole(store: ChunkStore, content: memoryview, place: Place) -> bool:
    stored = content[place.offset : place.offset + place.stored]
    try:
        unseal(store.key, Sealed(place.id, place.codec, place.size, stored))
    except Failure:
        return False
    return True


async def _index(store: ChunkStore, packs: list[str]) -> None:
    content = indexes.encode(store.key, [(pack, await store.table_of(pack)) for pack in sorted(packs)])
    await store.objects.put(indexes.name_of(content), content)
    await store.refresh()


async def _images(
    store: ChunkStore,
    packs: dict[str, int],
    bad: dict[str, set[bytes]],
    found: Checked,
    fault_of: Callable[[Recipe], str],
) -> None:
    broken: dict[str, str] = {}
    async for recipe in store.recipes(broken=broken.__setitem__):
        found.images += 1
        missing = sum(not _is_there(store, id, packs, bad) for id in recipe.chunks())
        fault = f"{missing} chunks are missing or damaged" if missing else await asyncio.to_thread(fault_of, recipe)
        if fault:
            found.damaged[names(recipe).place] = f"{recipe.name}: {fault}"
    found.images += len(broken)
    found.damaged |= broken


def _is_there(store: ChunkStore, id: bytes, packs: dict[str, int], bad: dict[str, set[bytes]]) -> bool:
    """Return whether any pack has a usable copy of a chunk. A bad pack without a list of chunks is bad as a whole."""

    def usable(pack: str) -> bool:
        return pack in packs and (pack not in bad or bool(bad[pack] and id not in bad[pack]))

    return store.index.find(id, usable) is not None

"""What images need is found whichever pack holds it, and an index that cannot be read changes nothing."""

from __future__ import annotations

import asyncio

import blake3
import pytest

from kybernate.store import reach as reaching
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format import index as indexes
from kybernate.store.format import recipe as recipes
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe, StoredFile
from kybernate.store.index import ChunkIndex
from kybernate.store.keys import StoreKey
from kybernate.store.objects import Objects
from tests.unit.store.stepped import SteppedObjects

KEY = StoreKey(b"k" * 32)
HELD = {"a": (1, 2), "b": (2, 3, 4), "c": (4, 5), "d": (1, 5, 6)}  # chunks by pack
PACKS = {letter * 64: tuple(Place(bytes([id]) * 32, 8, 8, 8, 0) for id in ids) for letter, ids in HELD.items()}


def pack(letters: str) -> frozenset[str]:
    return frozenset(letter * 64 for letter in letters)


async def _image(objects: Objects, name: str, *ids: int) -> None:
    file = StoredFile("file", tuple((8, bytes([id]) * 32) for id in ids))
    content = recipes.encode(KEY, Recipe(name, "", name, 1.0, b"", (file,)))
    await objects.put(recipes.object_name("", name), content)


async def _filled() -> ChunkStore:
    store = ChunkStore(SteppedObjects(), KEY)
    for number, ids in enumerate(((1, 2, 3), (3, 5), (9, 1), (5, 2))):
        await _image(store.objects, f"image-{number}", *ids)
    store.index.add(PACKS.items())
    return store


@pytest.mark.parametrize("most", [1, 3, 100])
def test_images_need_the_first_pack_that_is_not_condemned(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "NOTED_CHUNKS", most)

    async def scenario() -> None:
        store = await _filled()
        found = await reaching.reach(store, PACKS, pack("ac"))
        assert found == reaching.Reached(images=4, chunks=5, missing=1, packs=pack("bd"), stranded=0)

    asyncio.run(scenario())


@pytest.mark.parametrize("most", [1, 100])
def test_chunk_that_only_condemned_packs_hold_is_stranded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "NOTED_CHUNKS", most)

    async def scenario() -> None:
        store = await _filled()
        found = await reaching.reach(store, PACKS, pack("bcd"))
        assert (found.packs, found.stranded) == (pack("abc"), 2)
        assert list(reaching.stranded(store)) == [("b" * 64, PACKS["b" * 64][1]), ("c" * 64, PACKS["c" * 64][1])]

    asyncio.run(scenario())


def test_index_that_ends_in_the_middle_adds_nothing() -> None:
    content = indexes.encode(KEY, PACKS.items())
    cut = content[:-40]
    cut += blake3.blake3(cut, key=KEY.recipes).digest()

    async def scenario() -> None:
        objects, index = SteppedObjects(), ChunkIndex(":memory:", KEY)
        await objects.put("index/cut", cut)
        await index.refresh(objects)
        assert "middle" in index.broken["index/cut"]
        assert (index.packs(), index.count()) == (frozenset(), 0)
        await objects.delete(["index/cut"])
        await objects.put(indexes.name_of(content), content)
        await index.refresh(objects)
        assert index.packs() == pack("abcd")
        assert index.find(bytes([4]) * 32) == ("b" * 64, PACKS["b" * 64][2])

    asyncio.run(scenario())

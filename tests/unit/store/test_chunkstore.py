"""Images go into a chunk store and come back: what is sent, what is shared, what an interruption leaves."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.node.failure import NoImage
from kybernate.store import writer
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, StoreInvalid, StoreUnreachable
from kybernate.store.format import index as indexes
from kybernate.store.format import pack as packs
from kybernate.store.format.pack import object_name
from kybernate.store.format.recipe import Recipe
from kybernate.store.format.sealing import Sealed, seal
from kybernate.store.gc import collect
from kybernate.store.keys import StoreKey
from kybernate.store.parts import Part, PartBroken, WholePart
from kybernate.store.reader import fetch
from kybernate.store.sink import DirectorySink
from kybernate.store.source import DiskFile
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, Link, store
from tests.unit.store.stepped import MemoryFile, MemorySink, SteppedObjects

KEY = StoreKey(b"k" * 32)
DAY = 86400.0
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def image(id: str, *contents: bytes) -> ImageSource:
    files = tuple(MemoryFile(f"file-{number}", content) for number, content in enumerate(contents))
    return ImageSource(id, "team-a", f"web-{id}", 1.0, b"manifest " + id.encode(), files)


async def opened(objects: SteppedObjects) -> ChunkStore:
    return await ChunkStore(objects, KEY).open(create=True)


async def content_of(target: ChunkStore, recipe: Recipe) -> dict[str, bytes]:
    sink = MemorySink()
    await fetch(target, recipe, sink, Transfer())
    return {name: bytes(content) for name, content in sink.files.items()}


def test_image_comes_back_as_it_was() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        contents = os.urandom(1000), bytes(640) + os.urandom(64), b"text" * 100
        await store(await opened(objects), image("1", *contents), Transfer())
        other = await ChunkStore(objects, KEY).open()  # another node, without an index yet
        recipe = await other.recipe("team-a", "1")
        assert (recipe.name, recipe.manifest) == ("web-1", b"manifest 1")
        back = await content_of(other, recipe)
        assert [back[f"file-{number}"] for number in range(3)] == list(contents)

    run(scenario())


def test_equal_chunks_are_sent_once() -> None:
    async def scenario() -> None:
        target = await opened(SteppedObjects())
        weights = os.urandom(64 * 100)
        await store(target, image("1", weights, weights), first := Transfer())
        assert first.progress.known_bytes == len(weights)
        changed = weights[:64] + os.urandom(64) + weights[128:]
        await store(target, image("2", changed), second := Transfer())
        assert second.progress.known_bytes == len(weights) - 64
        assert second.progress.sent_bytes < 500

    run(scenario())


def test_zeros_are_not_sent() -> None:
    async def scenario() -> None:
        target = await opened(SteppedObjects())
        recipe = await store(target, image("1", bytes(6400)), transfer := Transfer())
        assert (transfer.progress.sent_bytes, transfer.progress.zero_bytes) == (0, 6400)
        assert await content_of(target, recipe) == {"file-0": bytes(6400)}

    run(scenario())


@pytest.mark.parametrize("after", range(0, 22, 2))
def test_interrupted_upload_leaves_no_image_and_is_continued(after: int) -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        source = image("1", os.urandom(6400))
        objects.calls.clear()
        objects.fail_after = after
        error = await _failure_of(store(target, source, Transfer()))
        there = [name for name in objects.contents if name.startswith("images/")]
        assert bool(there) == (error is None)
        objects.fail_after = None
        again = await opened(objects)
        recipe = await store(again, source, Transfer())
        assert (await content_of(again, recipe))["file-0"] == source.files[0].read(0, 6400)

    run(scenario())


async def _failure_of(work: Coroutine[Any, Any, object]) -> Exception | None:
    try:
        await work
    except StoreUnreachable as error:
        return error
    return None


def test_chunks_of_an_interrupted_upload_are_not_sent_again() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        source = image("1", os.urandom(6400))
        target = await opened(objects)

        async def refused(source: str, target: str) -> None:
            raise StoreUnreachable("the network went away before the recipe")

        objects.copy, copy = refused, objects.copy  # type: ignore[method-assign]
        with pytest.raises(StoreUnreachable, match="before the recipe"):
            await store(target, source, Transfer())
        objects.copy = copy  # type: ignore[method-assign]
        await store(await opened(objects), source, transfer := Transfer())
        assert transfer.progress.sent_bytes == 0
        assert transfer.progress.known_bytes == 6400

    run(scenario())


def test_flipped_bit_in_the_store_is_found_before_it_is_used() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        recipe = await store(target, image("1", os.urandom(640)), Transfer())
        (name,) = [name for name in objects.contents if name.startswith("packs/")]
        content, modified = objects.contents[name]
        objects.contents[name] = (content[:100] + bytes([content[100] ^ 4]) + content[101:], modified)
        with pytest.raises(ExceptionGroup) as found:
            await content_of(target, recipe)
        assert found.group_contains(ChunkDamaged)

    run(scenario())


@pytest.mark.parametrize(("mib_per_second", "level"), [(10, 6), (1000, 1)])
def test_level_of_compression_follows_the_speed_of_the_connection(
    monkeypatch: pytest.MonkeyPatch, mib_per_second: int, level: int
) -> None:
    """The first chunks have the usual level; the clock runs as fast as packs would be sent."""
    ticks, levels = itertools.count(step=2 / 16 / mib_per_second), list[int]()
    monkeypatch.setattr(packs, "PACK_BYTES", 2 << 16)
    file = MemoryFile("file", os.urandom(100 << 16), chunk=1 << 16)
    monkeypatch.setattr(writer, "Link", lambda: Link(lambda: next(ticks)))
    monkeypatch.setattr(writer, "THREADS", 2)

    def noted(key: StoreKey, id: bytes, content: bytes, *, level: int) -> Sealed:
        levels.append(level)
        return seal(key, id, content, level=0)

    monkeypatch.setattr(writer, "seal", noted)

    async def scenario() -> None:
        target = await opened(SteppedObjects())
        await store(target, ImageSource("1", "", "web", 1.0, b"", (file,)), Transfer(parallel=1, level=None))

    run(scenario())
    assert (levels[0], levels[-1]) == (3, level)


def test_missing_image_store_and_key_are_named() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        with pytest.raises(StoreInvalid, match="there is no store"):
            await ChunkStore(objects, KEY).open()
        target = await opened(objects)
        with pytest.raises(NoImage, match="team-a/9"):
            await target.recipe("team-a", "9")
        for wrong in (StoreKey(b"x" * 32), StoreKey(b"k" * 32, encrypted=True)):
            with pytest.raises(StoreInvalid, match="the store is a plain one of key"):
                await ChunkStore(objects, wrong).open(create=True)

    run(scenario())


def test_recipe_under_another_name_is_refused() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        await store(target, image("1", b"secret" * 20), Transfer())
        objects.contents["images/team-b/1"] = objects.contents["images/team-a/1"]
        with pytest.raises(StoreInvalid, match="the recipe of another image"):
            await target.recipe("team-b", "1")

    run(scenario())


def test_directory_comes_back_with_holes_and_the_manifest_last(tmp_path: Path) -> None:
    content = os.urandom(3 << 20) + bytes(4 << 20) + os.urandom(100)
    (tmp_path / "pages-1.img").write_bytes(content)
    (tmp_path / "back").mkdir()

    async def scenario() -> None:
        target = await opened(SteppedObjects())
        file = DiskFile(tmp_path / "pages-1.img", len(content))
        recipe = await store(target, ImageSource("1", "", "web", 1.0, b"manifest", (file,)), Transfer())
        sink = DirectorySink(tmp_path / "back", {file.name: file.size for file in recipe.files})
        await fetch(target, recipe, sink, Transfer())
        assert not (tmp_path / "back/kybernate-manifest.json").exists()
        sink.finish(recipe.manifest, durable=True)
        sink.close()

    run(scenario())
    back = tmp_path / "back/pages-1.img"
    assert back.read_bytes() == content
    assert back.stat().st_blocks * 512 < len(content) - (1 << 20)
    assert (tmp_path / "back/kybernate-manifest.json").read_bytes() == b"manifest"


# ---- collection


def test_removed_image_is_collected_in_two_steps() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        await store(target, image("1", os.urandom(640)), Transfer())
        kept = await store(target, image("2", os.urandom(640)), Transfer())
        await target.remove("team-a", "1")
        assert (await collect(target)).condemned_packs == 0, "too young"
        objects.clock += 2 * DAY
        assert (await collect(target)).condemned_packs == 1
        assert (await collect(target)).deleted_packs == 0, "noted too lately"
        objects.clock += 2 * DAY
        found = await collect(target)
        assert (found.deleted_packs, found.condemned_packs, found.missing_chunks) == (1, 0, 0)
        assert (await content_of(await opened(objects), kept))["file-0"]
        assert not [name for name in objects.contents if name.startswith("condemned/")]

    run(scenario())


def test_reader_with_an_old_index_finds_what_a_collection_has_moved() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        content = os.urandom(640)
        recipe = await store(target, image("1", content), Transfer())
        reader = await opened(objects)
        await reader.refresh()
        (old,) = [name for name in objects.contents if name.startswith("packs/")]
        del objects.contents[old]
        for name in [name for name in objects.contents if name.startswith("index/")]:
            del objects.contents[name]
        again = await opened(objects)
        await store(again, image("2", b"another" * 9, content), Transfer())  # in a pack of another name
        assert (await content_of(reader, recipe))["file-0"] == content

    run(scenario())


def test_missing_pack_is_named() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        recipe = await store(target, image("1", os.urandom(640)), Transfer())
        (pack,) = [name for name in objects.contents if name.startswith("packs/")]
        del objects.contents[pack]
        with pytest.raises(ExceptionGroup) as found:
            await content_of(target, recipe)
        assert found.group_contains(StoreInvalid, match="is missing")

    run(scenario())


def test_pack_that_only_an_index_knows_saves_no_chunk() -> None:
    async def scenario() -> None:
        objects = SteppedObjects()
        target = await opened(objects)
        content = os.urandom(640)
        recipe = await store(target, image("1", content), Transfer())
        (pack,) = [name.rpartition("/")[2] for name in objects.contents if name.startswith("packs/")]
        found = [target.index.find(id) for id in recipe.chunks()]
        gone = ("0" * 64, [place for _, place in filter(None, found)])  # its name is before any other
        objects.contents["index/stale"] = (indexes.encode(KEY, [gone]), objects.clock)
        for _ in range(3):
            objects.clock += 2 * DAY
            await collect(await opened(objects))
        assert [name for name in objects.contents if name.endswith(pack)]
        assert (await content_of(await opened(objects), recipe))["file-0"] == content

    run(scenario())


class FlippedObjects(SteppedObjects):
    """The first `flips` answers to requests for a part have a flipped bit."""

    flips = 0

    async def get_range(self, name: str, start: int, length: int) -> bytes:
        content = bytearray(await super().get_range(name, start, length))
        if self.flips and name.startswith("packs/"):
            self.flips -= 1
            content[len(content) // 2] ^= 1
        return bytes(content)


@pytest.mark.parametrize("flips", [1, 2])
def test_damaged_chunk_is_read_again_and_then_from_another_pack(flips: int) -> None:
    """The bit flips on the way once, or twice: then the first pack counts as damaged."""

    async def scenario() -> None:
        objects, content = FlippedObjects(), os.urandom(64)
        target = await opened(objects)
        recipe = await store(target, image("1", content), Transfer())
        (chunk,) = recipe.chunks()
        found = target.index.find(chunk)
        assert found is not None
        pack, place = found
        copy = "f" * 64
        objects.contents[object_name(copy)] = objects.contents[object_name(pack)]
        target.index.add([(copy, [place])])
        objects.flips, objects.calls = flips, []
        assert (await content_of(target, recipe))["file-0"] == content
        read = [call for call in objects.calls if call.startswith("get packs/")]
        assert read == [f"get {object_name(one)}" for one in (pack, pack, copy)[: flips + 1]]
        objects.flips = 3
        with pytest.raises(ExceptionGroup) as caught:
            await content_of(target, recipe)
        assert "is damaged in all packs that have it" in str(caught.value.exceptions[0])

    run(scenario())


class BreakingObjects(SteppedObjects):
    """The first part of a pack that is read breaks off after `whole` bytes, and the pack goes if it `leaves`."""

    whole, leaves = 0, False

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        if not self.whole or not name.startswith("packs/"):
            return await super().read_range(name, start, length, work)
        content, self.whole = self._content(name)[start : start + self.whole], 0
        if self.leaves:
            del self.contents[name]
        return await asyncio.to_thread(work, BrokenPart(content))


class BrokenPart(WholePart):
    def take(self, size: int) -> memoryview:
        if len(view := super().take(size)) < size:
            raise PartBroken
        return view


class OnceSink(MemorySink):
    """Refuses bytes that it has."""

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        assert not any(self.files.get(file, b"")[offset : offset + len(content)])
        super().write(file, offset, content)


@pytest.mark.parametrize("leaves", [False, True])
def test_part_that_breaks_off_is_continued_behind_what_came(leaves: bool) -> None:
    """Also where a collection has moved the chunks of the pack meanwhile. No byte is written twice."""

    async def scenario() -> None:
        objects, content = BreakingObjects(), os.urandom(640)
        target = await opened(objects)
        recipe = await store(target, image("1", content), Transfer())
        found = [one for id in recipe.chunks() if (one := target.index.find(id)) is not None]
        ((pack, _), *_), copy = found, "f" * 64
        objects.contents[object_name(copy)] = objects.contents[object_name(pack)]
        objects.contents["index/copy"] = (indexes.encode(KEY, [(copy, [place for _, place in found])]), objects.clock)
        objects.whole, objects.leaves = 200, leaves
        sink, transfer = OnceSink(), Transfer()
        await fetch(target, recipe, sink, transfer)
        assert objects.whole == 0
        assert bytes(sink.files["file-0"]) == content
        assert transfer.progress.done_bytes == transfer.progress.total_bytes == 640

    run(scenario())

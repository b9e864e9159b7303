"""What every tier does, whatever kind of place it is: one suite over memory, disk, object store and another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Failure, NoImage
from kybernate.store.errors import ImageDamaged
from kybernate.store.keys import make_key
from kybernate.store.place import open_store
from kybernate.store.tiers.directory import DirectorySource, DirectoryTier
from kybernate.store.tiers.later import LaterTier
from kybernate.store.tiers.object import ObjectTier
from kybernate.store.tiers.tier import Ref, Tier
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from tests.contract.store.peers import Node, nodes, serving, signed_image
from tests.contract.store.servers import free_port, usual
from tests.contract.store.test_object_stores import MIB, at
from tests.unit.store.stepped import MemorySink
from tests.unit.store.test_directory_tier import Cut

REF = Ref("team-a", "web", "image-1")
ABSENT = Ref("team-a", "web", "image-2")
WRITTEN = ["ram", "disk", "object", "later"]  # tiers that take images over
ALL = [*WRITTEN, "peer"]

Scenario = Callable[["Place"], Coroutine[Any, Any, None]]


@dataclass
class Place:
    """A tier, and the directory of an image for it, of which it has a copy only where it is read-only."""

    tier: Tier
    image: Path

    def source(self) -> DirectorySource:
        found = read_image(self.image)
        return DirectorySource(REF, found.content, self.image, found.manifest)

    async def filled(self) -> Tier:
        """Return the tier once it has the image."""
        if not self.tier.name.startswith("peer"):
            await self.tier.receive(self.source(), Transfer())
        return self.tier

    async def shown(self) -> list[Ref]:
        return [held.ref async for held in self.tier.images()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, str, Path]]:
    """A node whose agent runs, with an image, an S3 server, and a key."""
    place = tmp_path_factory.mktemp("tiers")
    with usual(place / "server") as server:
        one, two = nodes(place / "nodes", port := free_port())
        signed_image(two, one.images / "team-a/web", id=REF.id, mib=3)
        make_key(place / "store.key")
        with serving(one.place, port):
            yield two, server.endpoint, place / "store.key"


@pytest.fixture
def run(world: tuple[Node, str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Return what runs a scenario with the tier that the test's parameter names."""
    node, endpoint, key = world
    kind = request.node.callspec.params["kind"]

    @asynccontextmanager
    async def opened() -> AsyncIterator[Tier]:
        match kind:
            case "ram" | "disk":
                yield DirectoryTier(kind, 1 if kind == "ram" else 2, tmp_path / kind, durable=kind == "disk")
            case "peer":
                yield node.peer
            case _:
                place = at(endpoint, request.node.name, key)
                store = await open_store(place).open(create=True)
                tier = ObjectTier(store, place.url)

                async def later() -> Tier:
                    return tier

                yield tier if kind == "object" else LaterTier("object", 3, durable=True, opened=later)
                store.close()

    async def scenario(work: Scenario) -> None:
        async with opened() as tier:
            await work(Place(tier, node.server.images / "team-a/web"))

    return lambda work: asyncio.run(asyncio.wait_for(scenario(work), 60))


@pytest.mark.parametrize("kind", ALL)
def test_image_is_found_listed_and_read(run: Callable[[Scenario], None], kind: str) -> None:
    async def scenario(place: Place) -> None:
        tier = await place.filled()
        held = await tier.find(REF)
        assert (held.ref, held.bytes > 3 * MIB, bool(held.place)) == (REF, True, True)
        assert await place.shown() == [REF]
        await tier.verify(REF)
        assert (await tier.room()).used >= 0
        source, sink, transfer = await tier.open(REF), MemorySink(), Transfer()
        assert (source.ref, source.manifest) == (REF, (place.image / NAME).read_bytes())
        await source.pour(sink, transfer, Nothing())
        await source.close()
        files = {file.name: (place.image / file.name).read_bytes() for file in read_image(place.image).manifest.files}
        assert {name: bytes(content) for name, content in sink.files.items() if content} == {
            name: content for name, content in files.items() if content
        }
        assert transfer.progress.done_bytes == transfer.progress.total_bytes

    run(scenario)


@pytest.mark.parametrize("kind", ALL)
def test_what_a_receiver_has_is_not_read(run: Callable[[Scenario], None], kind: str) -> None:
    class All:
        def has(self, file: str, offset: int, size: int) -> bool:
            return True

    async def scenario(place: Place) -> None:
        source, transfer = await (await place.filled()).open(REF), Transfer()
        await source.pour(MemorySink(), transfer, All())
        await source.close()
        assert transfer.progress.sent_bytes == 0
        assert transfer.progress.done_bytes == transfer.progress.total_bytes

    run(scenario)


@pytest.mark.parametrize("kind", ALL)
def test_image_that_is_not_there_is_named(run: Callable[[Scenario], None], kind: str) -> None:
    async def scenario(place: Place) -> None:
        tier = await place.filled()
        for call in (tier.find, tier.open, tier.verify):
            with pytest.raises(NoImage, match=r"has no image|another image|no copy|no tier"):
                await call(ABSENT)

    run(scenario)


@pytest.mark.parametrize("kind", WRITTEN)
def test_image_is_received_once_and_removed(run: Callable[[Scenario], None], kind: str) -> None:
    async def scenario(place: Place) -> None:
        tier = await place.filled()
        again = Transfer()
        assert (await tier.receive(place.source(), again)).ref == REF
        assert again.progress.sent_bytes == 0
        for _ in range(2):
            await tier.remove(REF)
            assert await place.shown() == []
        with pytest.raises(NoImage, match=r"has no image|another image|no copy|no tier"):
            await tier.find(REF)

    run(scenario)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("error", [OSError("the network"), asyncio.CancelledError()], ids=["failed", "cancelled"])
def test_transfer_that_was_cut_shows_nothing_and_continues(
    run: Callable[[Scenario], None], kind: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate.store.format.pack.PACK_BYTES", MIB)

    async def scenario(place: Place) -> None:
        with pytest.raises(BaseException):  # noqa: B017, PT011  # a group, where it was in a task
            await place.tier.receive(place.source(), Cut(2, error))
        assert await place.shown() == []
        with pytest.raises(NoImage, match=r"has no image|another image|no copy|no tier"):
            await place.tier.find(REF)
        again = Transfer()
        await place.tier.receive(place.source(), again)
        assert again.progress.known_bytes > 0
        await place.tier.verify(REF)
        await place.tier.discard(REF)
        assert await place.shown() == [REF]

    run(scenario)


@pytest.mark.parametrize("kind", WRITTEN)
def test_damaged_files_never_become_an_image(run: Callable[[Scenario], None], kind: str, tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        for path in place.image.iterdir():
            (damaged / path.name).write_bytes(path.read_bytes())
        with (damaged / "pages-1.img").open("r+b") as stream:
            stream.seek(MIB)
            stream.write(b"not what was written")
        with pytest.raises(ImageDamaged, match=r"pages-1\.img"):
            await place.tier.receive(Place(place.tier, damaged).source(), Transfer())
        assert await place.shown() == []

    run(scenario)


@pytest.mark.parametrize("kind", ["peer"])
def test_tier_of_another_node_is_only_read(run: Callable[[Scenario], None], kind: str) -> None:
    async def scenario(place: Place) -> None:
        with pytest.raises(Failure, match="are written by its own agent"):
            await place.tier.receive(place.source(), Transfer())
        with pytest.raises(Failure, match="are removed by its own agent"):
            await place.tier.remove(REF)

    run(scenario)


class Nothing:
    """What a receiver has that begins."""

    def has(self, file: str, offset: int, size: int) -> bool:
        return False

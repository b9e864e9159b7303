"""Whatever writers, removals, collections and clocks do, in any order, and whatever dies: what exists is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kybernate.node.failure import Failure
from kybernate.store import lease
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreUnreachable
from kybernate.store.format import pack as packs
from kybernate.store.format import recipe as recipes
from kybernate.store.gc import World, collect, decide
from kybernate.store.keys import StoreKey
from kybernate.store.lease import LASTS_SECONDS
from kybernate.store.reader import fetch
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, store
from tests.unit.store.simulation import Chances, Client, Service, Simulation, repeatable
from tests.unit.store.stepped import MemoryFile, MemorySink, SteppedObjects

KEY = StoreKey(b"k" * 32)
GRACE = 300.0  # less than a lease lasts, so that notes come of age while their writers live

TIMES = st.floats(0, 10_000, allow_nan=False)
PACKS = st.sampled_from("abcdef")


@given(
    st.builds(
        World,
        now=st.just(10_000.0),
        packs=st.dictionaries(PACKS, TIMES),
        reached=st.frozensets(PACKS),
        condemned=st.dictionaries(PACKS, TIMES),
        held=st.frozensets(PACKS),
        leases=st.lists(TIMES, max_size=3).map(tuple),
    )
)
def test_what_is_reached_young_or_held_stays(world: World) -> None:
    plan = decide(world, grace=GRACE)
    for pack in plan.delete:
        assert pack not in world.reached | world.held
        assert world.condemned[pack] <= world.now - GRACE
    for pack in plan.condemn:
        assert pack not in world.reached
        assert pack not in world.condemned
        assert all(world.packs[pack] < began for began in world.leases)
    assert not {*plan.delete} & {*plan.condemn}


class Incomplete(AssertionError):
    """An image exists, and one of its chunks does not."""


@cache
def ids_in_pack(content: bytes) -> frozenset[bytes]:
    footer = packs.read_footer(len(content), content[-packs.FOOTER.size :])
    return frozenset(place.id for place in packs.places_of(content[footer.start : footer.start + footer.length]))


@cache
def ids_in_recipe(content: bytes) -> frozenset[bytes]:
    return frozenset(recipes.decode(KEY, content).chunks())


def every_image_is_complete(service: Service) -> None:
    there = frozenset[bytes]().union(*(ids_in_pack(service.contents[name][0]) for name in service.names("packs")))
    for name in service.names("images"):
        if not ids_in_recipe(service.contents[name][0]) <= there:
            raise Incomplete(f"{name}, after {service.happened[-1]}")


class Scenario:
    """Six nodes: two write, one removes, three collect. A node keeps its index from turn to turn, unless it dies."""

    def __init__(self, seed: int, chances: Chances) -> None:
        self.world = Simulation(seed, chances, every_image_is_complete)
        self.known = [self.world.chance.randbytes(64) for _ in range(6)]  # content that images have in common
        self.nodes: list[ChunkStore] = []

    def run(self, turns: int = 4) -> None:
        with repeatable(self.world):
            asyncio.run(self._run(turns))

    async def _run(self, turns: int) -> None:
        await self.world.quietly(ChunkStore(self.world.client(), KEY).open(create=True))
        self.nodes = [ChunkStore(self.world.client(), KEY) for _ in range(6)]
        for turn in range(turns):
            await self.world.play([self._work(number, turn) for number in range(len(self.nodes))])
            await self.world.quietly(self._read_all())
        await self.world.quietly(self._tidy())

    def _work(self, number: int, turn: int) -> tuple[Client, Coroutine[Any, Any, None]]:
        client, node = self.world.client(), self.nodes[number]
        if isinstance(node.objects, Client) and node.objects.dead:
            node = self.nodes[number] = ChunkStore(client, KEY)
        node.objects = client
        if number < 2:
            return client, _unless_unreachable(self._write(node, f"{turn}-{number}"))
        return client, _unless_unreachable(self._remove(node) if number == 2 else self._collect(node))

    async def _write(self, node: ChunkStore, id: str) -> None:
        content = b"".join(self.world.chance.sample(self.known, 3))
        source = ImageSource(id, "-", id, 0.0, b"", (MemoryFile("file", content),))
        try:
            await store(node, source, Transfer())
        except Failure:
            return

    async def _remove(self, node: ChunkStore) -> None:
        if existing := self.world.service.names("images"):
            await node.remove("-", self.world.chance.choice(existing).rpartition("/")[2])

    async def _collect(self, node: ChunkStore) -> None:
        for _ in range(3):  # so that what one notes comes of age for the next, while a writer is still at work
            await collect(node, grace=GRACE)

    async def _read_all(self) -> None:
        """Every image comes back on a node that knows nothing."""
        target = ChunkStore(self.world.client(), KEY)
        async for stored in target.images():
            recipe = await target.recipe_of(stored.name)
            await fetch(target, recipe, sink := MemorySink(), Transfer())
            assert len(sink.files["file"]) == recipe.size

    async def _tidy(self) -> None:
        """What no image needs goes, with all that writers and collections have left."""
        service = self.world.service
        node = ChunkStore(self.world.client(), KEY)
        for _ in range(8):
            service.clock += 2 * max(GRACE, LASTS_SECONDS) + 10_000
            await collect(node, grace=GRACE)
        needed = frozenset[bytes]().union(*(ids_in_recipe(service.contents[n][0]) for n in service.names("images")))
        for name in service.names("packs"):
            assert ids_in_pack(service.contents[name][0]) & needed, f"{name} is left"
        for prefix in ("condemned", lease.PREFIX, lease.DRAFTS):
            assert not service.names(prefix)


async def _unless_unreachable(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreUnreachable:
        return


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_image_that_exists_is_complete(seed: int) -> None:
    Scenario(seed, Chances()).run()


def test_seed_repeats() -> None:
    one, other = (Scenario(7, Chances()) for _ in range(2))
    one.run()
    other.run()
    assert one.world.service.happened == other.world.service.happened


@pytest.mark.parametrize("collected", [False, True])
def test_writer_that_was_away_publishes_nothing_where_it_was_ended(collected: bool) -> None:
    async def scenario() -> bool:
        objects = SteppedObjects()
        target = await ChunkStore(objects, KEY).open(create=True)

        class Interrupted(SteppedObjects):
            """The writer is away between its last look for a tombstone and its publication."""

            async def copy(self, source: str, target: str) -> None:
                objects.clock += 2 * LASTS_SECONDS
                if collected:
                    await collect(await ChunkStore(objects, KEY).open(), grace=GRACE)
                await super().copy(source, target)

        away = Interrupted()
        away.contents = objects.contents
        target.objects = away
        source = ImageSource("1", "-", "1", 0.0, b"", (MemoryFile("file", b"content" * 9),))
        try:
            await store(target, source, Transfer())
        except Failure:
            assert not [name for name in objects.contents if name.startswith("images/")]
            return True
        return False

    assert asyncio.run(scenario()) == collected

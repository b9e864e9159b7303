"""An agent demotes images to a service that refuses, is full, breaks off or is slow: what is said, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.journal import Journal
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.execute import NodeExecutor
from kybernate.agent.operations.store import SCHEMA
from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.node_tiers import DISK, OBJECT, RAM, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.agent.tier_settings import Tiers
from kybernate.registry.catalogue import Catalogue
from kybernate.store.format import pack as packs
from kybernate.store.keys import make_key
from kybernate.store.movement.turns import Turns
from kybernate.store.place import open_store
from kybernate.store.tiers.tier import Ref, Tier
from kybernate.verbs.copy import Copy
from kybernate.verbs.evict import Evict
from kybernate.verbs.model import Operation, State, Submission
from kybernate.verbs.node import Movement, Node
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.config import Config
from tests.contract.store.faulty import Fault, FaultyServer, faulty
from tests.contract.store.servers import ACCESS, SECRET, Server, usual
from tests.contract.store.test_object_stores import MIB, at
from tests.fakes.sized_image import write_sized_image
from tests.unit.agent.operations.world import Events

LARGE, SMALL = Ref("team-a", "large", "1"), Ref("team-a", "small", "2")
DEMOTE = Submission(Copy(LARGE.path, OBJECT, "request", demote=True))
PACKS = "/packs/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with usual(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def service(server: Server) -> Iterator[FaultyServer]:
    with faulty(server.port) as found:
        yield found


@dataclass
class Agent:
    """The parts of an agent that move images, over a disk with two images."""

    engine: Engine
    tiers: NodeTiers

    async def ended(self, submission: Submission) -> Operation:
        return await self.end_of(await self.engine.submit(submission))

    async def end_of(self, operation: Operation) -> Operation:
        async with asyncio.timeout(40):
            return [one async for one in self.engine.watch(operation.id)][-1]

    async def until(self, operation: Operation, holds: Callable[[Operation], bool]) -> None:
        async with asyncio.timeout(40):
            async for one in self.engine.watch(operation.id):
                if holds(one):
                    return
        pytest.fail("the operation has ended before")

    async def where(self, ref: Ref) -> set[str]:
        """Return the tiers that show an image."""
        return {tier.name for tier in await self.tiers.all() if ref in await _refs(tier)}


async def _refs(tier: Tier) -> list[Ref]:
    return [held.ref async for held in tier.images()]


@pytest.fixture
def run(
    service: FaultyServer, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Agent], Coroutine[Any, Any, None]]], None]:
    """Return what runs a scenario with an agent."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * MIB)
    make_key(tmp_path / "store.key")
    place = at(service.endpoint, request.node.name, tmp_path / "store.key")
    settings = StoreSettings(url=place.url, endpoint=place.endpoint, key=place.key, level=0, parallel=1)
    config = replace(Config(), checkpoint_root=tmp_path / "disk", memory_root=tmp_path / "ram")
    write_sized_image(tmp_path / "disk" / LARGE.path, id=LARGE.id, mib=6)
    write_sized_image(tmp_path / "disk" / SMALL.path, id=SMALL.id, mib=1)
    known = {ref.path: ref for ref in (LARGE, SMALL)}

    @asynccontextmanager
    async def agent() -> AsyncIterator[Agent]:
        store = await open_store(place).open(create=True)
        store.close()
        tiers = NodeTiers(lambda: config, lambda: settings, Tiers, tmp_path)
        journal = Journal(tmp_path / "journal", SCHEMA)
        with Catalogue(f"sqlite:///{tmp_path}/registry.db", node="node-1") as catalogue:
            replicas = Replicas(lambda: catalogue, lambda: config)
            movement = Movement(tiers, Turns(), replicas, lambda: settings, _ignore)
            node = Node("", ref_of=lambda wanted: astuple(known[wanted.image]), tiers=tiers.names, movement=movement)
            engine = Engine(journal, NodeExecutor(node), events=Events())
            running = asyncio.create_task(engine.run())
            try:
                yield Agent(engine, tiers)
            finally:
                running.cancel()
                await asyncio.wait({running})
                tiers.close()
                journal.close()

    async def scenario(work: Callable[[Agent], Coroutine[Any, Any, None]]) -> None:
        async with agent() as found:
            await work(found)

    return lambda work: asyncio.run(scenario(work))


Run = Callable[[Callable[[Agent], Coroutine[Any, Any, None]]], None]


def _ignore(directory: Path) -> None:
    return None


@pytest.mark.parametrize(
    ("status", "code", "type", "words"),
    [
        (403, "AccessDenied", "StoreDenied", "get, put, list and delete"),
        (507, "InsufficientStorage", "StoreFull", "make room"),
    ],
)
def test_refused_demotion_says_so_keeps_the_copy_and_continues_later(
    run: Run, service: FaultyServer, tmp_path: Path, status: int, code: str, type: str, words: str
) -> None:
    async def scenario(agent: Agent) -> None:
        service.add(Fault("PUT", PACKS, status, code, after=1))
        failed = await agent.ended(DEMOTE)
        assert failed.state == State.FAILED
        assert failed.fault is not None
        assert (failed.fault.type, words in failed.fault.advice) == (type, True)
        assert PACKS.strip("/") in failed.fault.message
        assert "no copy was removed" in failed.fault.state
        assert await agent.where(LARGE) == {DISK}
        assert not verify(tmp_path / "disk" / LARGE.path)
        service.heal()
        assert (await agent.ended(DEMOTE)).state == State.SUCCEEDED
        assert await agent.where(LARGE) == {OBJECT}

    run(scenario)


def test_demotion_outlasts_connections_that_break(run: Run, service: FaultyServer) -> None:
    async def scenario(agent: Agent) -> None:
        service.add(Fault("PUT", PACKS, times=2))
        assert (await agent.ended(DEMOTE)).state == State.SUCCEEDED
        assert service.met == 2
        assert await agent.where(LARGE) == {OBJECT}

    run(scenario)


def test_copy_on_the_disk_stays_while_the_other_one_cannot_be_examined(run: Run, service: FaultyServer) -> None:
    async def scenario(agent: Agent) -> None:
        service.add(Fault("GET", "packs", 403, "AccessDenied", after=2))  # twice is what the upload has listed
        failed = await agent.ended(DEMOTE)
        assert failed.fault is not None
        assert "no other tier has a good copy" in failed.fault.message
        assert "refused by the test" in failed.fault.message
        service.heal()
        assert await agent.where(LARGE) == {DISK, OBJECT}
        assert (await agent.ended(DEMOTE)).state == State.SUCCEEDED
        assert await agent.where(LARGE) == {OBJECT}

    run(scenario)


def test_slow_demotion_stops_no_other_work_and_is_cancelled(run: Run, service: FaultyServer, tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        service.bytes_per_second = 2 * MIB
        slow = await agent.engine.submit(DEMOTE)
        await agent.until(slow, lambda one: one.progress is not None and one.progress.done_bytes > 0)
        assert (await agent.ended(Submission(Copy(SMALL.path, RAM)))).state == State.SUCCEEDED
        assert not (await agent.engine.get(slow.id)).final
        await agent.engine.cancel(slow.id)
        assert (await agent.end_of(slow)).state == State.CANCELLED
        service.heal()
        assert await agent.where(LARGE) == {DISK}
        assert await agent.where(SMALL) == {DISK, RAM}
        assert not verify(tmp_path / "disk" / LARGE.path)
        assert (await agent.ended(DEMOTE)).state == State.SUCCEEDED

    run(scenario)


def test_images_move_between_memory_and_disk_while_the_service_is_away(run: Run, service: FaultyServer) -> None:
    async def scenario(agent: Agent) -> None:
        service.add(Fault("GET", "", 403, "AccessDenied"))
        assert (await agent.ended(Submission(Copy(SMALL.path, RAM)))).state == State.SUCCEEDED
        assert (await agent.ended(Submission(Evict(SMALL.path, RAM)))).state == State.SUCCEEDED
        assert not service.met, "the service was asked"
        failed = await agent.ended(Submission(Evict(SMALL.path, DISK)))
        assert failed.fault is not None
        assert "no other tier has a good copy" in failed.fault.message
        assert "refused by the test" in failed.fault.message

    run(scenario)

"""Object stores that are slow, full, or break connections: what is said, what is visible, and how it continues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreFull, StoreUnreachable
from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.transfer import Transfer
from kybernate.store.writer import store
from tests.contract.store.faulty import Fault, FaultyServer, faulty
from tests.contract.store.servers import SERVERS, Server, here
from tests.contract.store.test_object_stores import MIB, at, brought_back, image, run, same


@pytest.fixture(scope="module", params=here())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def service(server: Server) -> Iterator[FaultyServer]:
    with faulty(server.port) as found:
        yield found


@pytest.fixture
def place(service: FaultyServer, request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    make_key(tmp_path / "store.key")
    return at(service.endpoint, request.node.name, tmp_path / "store.key")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "image").mkdir()
    return tmp_path / "image"


async def with_one_image(place: StorePlace, directory: Path) -> ChunkStore:
    target = await open_store(place).open(create=True)
    await store(target, image(directory, "1", 1), Transfer())
    return target


async def names(place: StorePlace) -> list[str]:
    return [one.name async for one in (await open_store(place).open()).images()]


@pytest.mark.parametrize(("status", "code"), [(507, "InsufficientStorage"), (403, "QuotaExceeded")])
def test_full_service_is_named_and_what_it_has_stays(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
    tmp_path: Path,
    status: int,
    code: str,
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        source = image(directory, "2", 40)
        service.add(Fault("PUT", "/packs/", status, code, after=1))
        with pytest.raises(StoreFull, match="no room for packs/"):
            await store(target, source, Transfer(parallel=1, level=0))
        assert service.met
        assert await names(place) == ["images/team-a/1"]
        service.heal()
        await store(await open_store(place).open(), source, again := Transfer(level=0))
        assert again.progress.known_bytes > MIB, "what had been sent is sent again"
        assert await names(place) == ["images/team-a/1", "images/team-a/2"]
        await brought_back(await open_store(place).open(), "2", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def test_full_service_has_no_image_without_its_recipe(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        service.add(Fault("PUT", "/images/team-a/", 507, "InsufficientStorage"))
        source = image(directory, "2", 2)
        with pytest.raises(StoreFull, match="no room for"):
            await store(target, source, Transfer())
        assert await names(place) == ["images/team-a/1"]
        service.heal()
        await store(await open_store(place).open(), source, again := Transfer())
        assert again.progress.sent_bytes < MIB

    run(scenario())


def test_connections_that_break_are_made_again(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        service.add(Fault("PUT", "/packs/", times=2))
        await store(target, image(directory, "2", 8), Transfer())
        assert service.met == 2
        service.add(Fault("GET", "/packs/", times=2))
        await brought_back(await open_store(place).open(), "2", tmp_path / "back")
        assert service.met == 4

    run(scenario())
    assert same(directory, tmp_path / "back")


def test_connections_that_always_break_are_named(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        source = image(directory, "2", 8)
        service.add(Fault("PUT", "/packs/"))
        with pytest.raises(StoreUnreachable, match="packs/"):
            await store(target, source, Transfer())
        assert await names(place) == ["images/team-a/1"]
        service.heal()
        await store(await open_store(place).open(), source, Transfer())

    run(scenario())


def test_slow_service_gets_and_gives_all(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
    tmp_path: Path,
) -> None:
    """An upload that is given up meanwhile shows nothing; the next one continues."""

    async def scenario() -> None:
        target = await with_one_image(place, directory)
        source = image(directory, "2", 36)
        service.bytes_per_second = 20 * MIB
        moved = asyncio.Event()
        first = Transfer(level=0, report=lambda progress: moved.set() if progress.sent_bytes else None)
        upload = asyncio.create_task(store(target, source, first))
        await moved.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert await names(place) == ["images/team-a/1"]
        await store(await open_store(place).open(), source, again := Transfer(level=0))
        assert again.progress.known_bytes > MIB
        await brought_back(await open_store(place).open(), "2", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")

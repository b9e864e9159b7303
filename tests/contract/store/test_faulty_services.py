"""Object stores that are slow, full, or break connections: what is said, what is visible, and how it continues."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate.store.check import check
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreDenied, StoreFull, StoreInconsistent, StoreUnreachable
from kybernate.store.gc import collect
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


@pytest.mark.parametrize(("status", "code"), [(400, "NotImplemented"), (405, "MethodNotAllowed")])
def test_service_without_bulk_delete_is_asked_for_each_object(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
    status: int,
    code: str,
) -> None:
    async def scenario() -> None:
        service.add(Fault("POST", "delete", status, code))
        target = await with_one_image(place, directory)
        await target.objects.delete(["images/team-a/1", "images/team-a/none"])
        assert await names(place) == []
        assert [one async for one in target.objects.list("writers")] == [], "leases stay"
        assert service.met == 1, "it is asked again"
        assert "deletes one object per request" in (await check(target)).service[-1]

    run(scenario())


def test_deletion_that_is_refused_is_not_tried_one_by_one(place: StorePlace, service: FaultyServer) -> None:
    async def scenario() -> None:
        objects = open_store(place).objects
        await objects.put("a/one", b"1")
        service.add(Fault("POST", "delete", 403, "AccessDenied"))
        with pytest.raises(StoreDenied, match="AccessDenied"):
            await objects.delete(["a/one"])
        assert await objects.get("a/one") == b"1"

    run(scenario())


ONE = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
TRUNCATED = re.compile(rb"<IsTruncated>.*?</IsTruncated>")
TOKEN = re.compile(rb"<NextContinuationToken>.*?</NextContinuationToken>")


def cut(content: bytes, *, says_so: bool) -> bytes:
    """Return a list with its first two objects, which says that it is whole, or that it is not, without a token."""
    left = iter(range(2))
    content = TOKEN.sub(b"", ONE.sub(lambda one: one[0] if next(left, None) is not None else b"", content))
    return TRUNCATED.sub(b"<IsTruncated>%s</IsTruncated>" % (b"true" if says_so else b"false"), content)


@pytest.mark.parametrize("says_so", [True, False])
def test_list_that_is_cut_is_refused_and_no_pack_deleted(
    place: StorePlace,
    service: FaultyServer,
    directory: Path,
    tmp_path: Path,
    says_so: bool,
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        for id in "234":
            await store(target, image(directory, id, 1), Transfer())
        packs = await target.packs()
        service.lists = lambda content: cut(content, says_so=says_so)
        for work in (names(place), collect(target, grace=0), collect(target, grace=0), check(target)):
            with pytest.raises(StoreInconsistent, match="is cut: it has 2 objects and not"):
                await work
        service.lists = None
        assert await target.packs() == packs
        await brought_back(await open_store(place).open(), "4", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def backwards(content: bytes) -> bytes:
    """Return a list whose objects come in the reverse order."""
    objects = iter(ONE.findall(content)[::-1])
    return ONE.sub(lambda one: next(objects), content)


def with_a_key_twice(content: bytes) -> bytes:
    return ONE.sub(lambda one: one[0] * 2, content, count=1)


def with_a_key_of_others(content: bytes) -> bytes:
    return ONE.sub(lambda one: one[0] + KEY_OF_LIST.sub(rb"\1~of-others", one[0]), content)


KEY_OF_LIST = re.compile(rb"(<Key>(?:[^<]*/)?(?:packs|images|writers|notes|index))/[^<]*")


@pytest.mark.parametrize(
    ("lie", "said"),
    [(backwards, "is not in order"), (with_a_key_twice, "twice"), (with_a_key_of_others, "which is not below it")],
)
def test_collection_refuses_a_list_that_lies_and_deletes_nothing(
    place: StorePlace, service: FaultyServer, directory: Path, lie: Callable[[bytes], bytes], said: str
) -> None:
    async def scenario() -> None:
        target = await with_one_image(place, directory)
        for id in "234":
            await store(target, image(directory, id, 1), Transfer())
        packs = await target.packs()
        service.lists = lie
        for _ in range(2):
            with pytest.raises(StoreInconsistent, match=said):
                await collect(target, grace=0)
        service.lists = None
        assert await target.packs() == packs

    run(scenario())


def test_list_that_repeats_its_page_is_refused(place: StorePlace, service: FaultyServer, directory: Path) -> None:
    first: list[bytes] = []

    def repeated(content: bytes) -> bytes:
        if not first:
            more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
            first.append(TRUNCATED.sub(more, TOKEN.sub(b"", content)))
        return first[0]

    async def scenario() -> None:
        await with_one_image(place, directory)
        service.lists = repeated
        with pytest.raises(StoreInconsistent, match="has images/team-a/1 twice"):
            await names(place)

    run(scenario())


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

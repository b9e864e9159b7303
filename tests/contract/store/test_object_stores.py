"""One suite over a directory and each S3 server that is here: objects, images, interruptions, collections."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.store.check import check
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ObjectMissing, StoreDenied, StoreFull, StoreUnreachable
from kybernate.store.gc import collect
from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.reader import fetch
from kybernate.store.sink import DirectorySink
from kybernate.store.source import DiskFile
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, store
from tests.contract.store.servers import BUCKET, OPTIONS, SERVERS, Server, here

T = TypeVar("T")
MIB = 1 << 20


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 200))


@pytest.fixture(scope="module", params=["directory", *here()])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | None]:
    if request.param == "directory":
        yield None
        return
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def place(server: Server | None, request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """Return an empty place of its own for each test."""
    make_key(tmp_path / "store.key")
    if server is None:
        return StorePlace(f"file://{tmp_path}/store", tmp_path / "store.key")
    return place_on(server, request.node.name, tmp_path / "store.key")


def place_on(server: Server, test: str, key: Path) -> StorePlace:
    return at(server.endpoint, test, key)


def at(endpoint: str, test: str, key: Path) -> StorePlace:
    prefix = test.translate(str.maketrans("[]", "--"))
    return StorePlace(f"s3://{BUCKET}/{prefix}", key, endpoint=endpoint, options=dict(OPTIONS))


@pytest.fixture(params=here("moto"))
def durable_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that checks credentials, and whose objects outlive it."""
    (tmp_path / "server").mkdir()
    make_key(tmp_path / "store.key")
    with SERVERS[request.param](tmp_path / "server") as found:
        yield found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "image").mkdir()
    return tmp_path / "image"


def image(directory: Path, id: str, mebibytes: int = 0) -> ImageSource:
    """Return an image of the files in `directory`, after a file of random bytes was added to it."""
    if mebibytes:
        (directory / f"pages-{id}.img").write_bytes(os.urandom(mebibytes * MIB))
    files = tuple(DiskFile(path, path.stat().st_size) for path in sorted(directory.iterdir()))
    return ImageSource(id, "team-a", f"web-{id}", 1.0, b"manifest", files)


async def brought_back(target: ChunkStore, id: str, into: Path, transfer: Transfer | None = None) -> None:
    recipe = await target.recipe("team-a", id)
    into.mkdir()
    sink = DirectorySink(into, {file.name: file.size for file in recipe.files})
    await fetch(target, recipe, sink, transfer or Transfer())
    sink.close()


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def test_objects_are_written_read_listed_and_deleted(place: StorePlace) -> None:
    async def scenario() -> None:
        objects = open_store(place).objects
        await objects.put("a/one", b"0123456789")
        await objects.put("a/one", bytearray(b"9876543210"))
        await objects.put("a/b/two", b"")
        await objects.put("ab/three", b"x")
        assert await objects.get("a/one") == b"9876543210"
        assert await objects.get_range("a/one", 2, 3) == b"765"
        assert (await objects.head("a/one")).size == 10
        assert sorted([one.name async for one in objects.list("a")]) == ["a/b/two", "a/one"]
        assert [one.name async for one in objects.list("none")] == []
        await objects.delete(["a/one", "a/none"])
        for work in (objects.get("a/one"), objects.get_range("a/one", 0, 1), objects.head("a/one")):
            with pytest.raises(ObjectMissing, match="a/one"):
                await work

    run(scenario())


def test_list_has_more_than_one_page(place: StorePlace) -> None:
    async def scenario() -> None:
        objects = open_store(place).objects
        for begin in range(0, 1100, 50):
            await asyncio.gather(*(objects.put(f"many/{number:04}", b"") for number in range(begin, begin + 50)))
        found = [one.name async for one in objects.list("many")]
        assert sorted(found) == [f"many/{number:04}" for number in range(1100)]
        await objects.delete(found)
        assert [one async for one in objects.list("many")] == []

    run(scenario())


def test_image_is_stored_and_brought_back(place: StorePlace, directory: Path, tmp_path: Path) -> None:
    (directory / "core-1.img").write_bytes(b"small " * 2000)
    with (directory / "kybernate-vram-1-0.bin").open("wb") as sparse:
        sparse.truncate(9 * MIB)
        sparse.write(os.urandom(MIB))

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 34), first := Transfer())
        assert first.progress.zero_bytes >= 6 * MIB
        other = await open_store(place).open()
        await brought_back(other, "1", tmp_path / "back")
        (directory / "pages-1.img").open("r+b").write(b"changed")
        await store(target, image(directory, "2"), second := Transfer())
        assert second.progress.sent_bytes < 3 * MIB, "one chunk has changed"
        found = await check(target, read=True)
        assert (found.images, found.problems, found.damaged, found.unindexed) == (2, [], {}, [])

    run(scenario())
    (directory / "pages-1.img").open("r+b").write((tmp_path / "back/pages-1.img").read_bytes()[:7])
    assert same(directory, tmp_path / "back")


def test_encrypted_store_gives_nothing_away(place: StorePlace, directory: Path, tmp_path: Path) -> None:
    (directory / "core-1.img").write_bytes(b"the secret of team-a " * 5000)

    async def scenario() -> None:
        target = await open_store(replace(place, encrypted=True)).open(create=True)
        await store(target, image(directory, "1"), Transfer())
        for prefix in ("packs", "images", "index"):
            async for one in target.objects.list(prefix):
                content = await target.objects.get(one.name)
                assert b"secret" not in content
                assert b"core-1" not in content
        await brought_back(target, "1", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def test_flipped_bit_is_found_and_named(place: StorePlace, directory: Path) -> None:
    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        (pack,) = [one.name async for one in target.objects.list("packs")]
        content = bytearray(await target.objects.get(pack))
        content[MIB] ^= 1
        await target.objects.put(pack, content)
        found = await check(target, read=True)
        assert list(found.damaged) == ["images/team-a/1"]
        assert "1 of 2 chunks are damaged" in found.problems[0]

    run(scenario())


def test_index_is_made_again_from_the_packs(place: StorePlace, directory: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        await target.objects.delete([one.name async for one in target.objects.list("index")])
        other = await open_store(place).open()
        assert list((await check(other)).damaged) == ["images/team-a/1"]
        assert (await check(other, repair=True)).damaged == {}
        await brought_back(other, "1", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def test_collection_keeps_what_images_need(place: StorePlace, directory: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        await store(target, image(directory, "2", 3), Transfer())
        (directory / "pages-2.img").unlink()
        await target.remove("team-a", "2")
        await asyncio.sleep(1.1)  # the service's times have seconds
        assert (await collect(target, grace=0)).condemned_packs == 1
        await asyncio.sleep(1.1)
        assert (await collect(target, grace=0)).deleted_packs == 1
        found = await check(target, read=True)
        assert (found.images, found.packs, found.damaged, found.problems) == (1, 1, {}, [])
        await brought_back(target, "1", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def test_two_writers_of_one_content(place: StorePlace, directory: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = [await open_store(place).open(create=True) for _ in range(2)]
        image(directory, "0", 5)
        await asyncio.gather(
            store(first, image(directory, "1"), Transfer()), store(second, image(directory, "2"), Transfer())
        )
        for id in ("1", "2"):
            await brought_back(first, id, tmp_path / id)

    run(scenario())
    assert same(directory, tmp_path / "1")
    assert same(directory, tmp_path / "2")


def test_wrong_credentials_are_named(durable_server: Server, tmp_path: Path) -> None:
    place = place_on(durable_server, "wrong", tmp_path / "store.key")
    wrong = replace(place, options={"access_key_id": "nobody", "secret_access_key": "nothing"})
    with pytest.raises(StoreDenied, match=r"kybernate-store\.json"):
        run(open_store(wrong).open(create=True))


def test_server_that_dies_is_named_and_the_upload_continued(
    durable_server: Server, directory: Path, tmp_path: Path
) -> None:
    place = place_on(durable_server, "dies", tmp_path / "store.key")

    async def scenario() -> int:
        target = await open_store(place).open(create=True)
        source = image(directory, "1", 100)
        transfer = Transfer(parallel=1)
        transfer.report = lambda progress: durable_server.kill() if progress.sent_bytes > 40 * MIB else None
        with pytest.raises(StoreUnreachable):
            await store(target, source, transfer)
        durable_server.start()
        again = await open_store(place).open()
        assert [one async for one in again.images()] == []
        await check(again, repair=True)  # the index could not be written
        await store(again, source, second := Transfer())
        await brought_back(again, "1", tmp_path / "back")
        return second.progress.known_bytes

    assert run(scenario()) >= 40 * MIB
    assert same(directory, tmp_path / "back")


def test_object_is_copied_as_it_is(place: StorePlace) -> None:
    async def scenario() -> None:
        objects = open_store(place).objects
        await objects.put("drafts/one", b"recipe")
        await objects.put("images/a/one", b"older")
        await objects.copy("drafts/one", "images/a/one")
        assert await objects.get("images/a/one") == b"recipe"
        await objects.delete(["drafts/one"])
        with pytest.raises(ObjectMissing, match="drafts/one"):
            await objects.copy("drafts/one", "images/a/one")
        assert await objects.get("images/a/one") == b"recipe"

    run(scenario())


def test_parts_are_read_from_a_service_that_answers_them_with_200(durable_server: Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        objects = open_store(place_on(durable_server, "parts", tmp_path / "store.key")).objects
        await objects.put("one", content := os.urandom(3 * MIB))
        parts = [(0, 10), (MIB, MIB), (3 * MIB - 5, 5), (3 * MIB - 5, 100)]
        found = await asyncio.gather(*(objects.get_range("one", *part) for part in parts * 3))
        assert found == [content[start : start + length] for start, length in parts * 3]
        assert objects.ranged
        with pytest.raises(ObjectMissing, match="none"):
            await objects.get_range("none", 0, 10)

    run(scenario())


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.contract.store.test_object_stores import MIB, Transfer, at, image, open_store, run, store

def sent(progress):
    if progress.sent_bytes > 30 * MIB:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    target = await open_store(at(sys.argv[1], "killed", Path(sys.argv[2]))).open()
    await store(target, image(Path(sys.argv[3]), "1"), Transfer(report=sent))

run(main())
"""


def test_upload_killed_in_the_middle_is_continued(durable_server: Server, directory: Path, tmp_path: Path) -> None:
    """The process dies without a word: its lease and its packs stay behind, and no index names them."""
    key = tmp_path / "store.key"
    place = place_on(durable_server, "killed", key)

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        source = image(directory, "1", 70)
        argv = [sys.executable, "-c", KILLED, durable_server.endpoint, str(key), str(directory)]
        done = await asyncio.to_thread(subprocess.run, argv, check=False)
        assert done.returncode == -signal.SIGKILL
        assert await target.packs()
        assert [one async for one in target.objects.list("writers")]
        assert [one async for one in target.images()] == []
        found = await collect(await open_store(place).open(), grace=0)
        assert (found.missing_chunks, found.deleted_packs) == (0, 0), "the lease lives"
        await store(await open_store(place).open(), source, Transfer())
        await brought_back(target, "1", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


@pytest.mark.root
def test_full_place_is_named_and_holds_what_it_held(directory: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    make_key(tmp_path / "store.key")
    place = StorePlace(f"file://{small}/store", tmp_path / "store.key")

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        with pytest.raises(StoreFull, match="no room"):
            await store(target, image(directory, "2", 40), Transfer())
        again = await open_store(place).open()
        assert [one.name async for one in again.images()] == ["images/team-a/1"]
        (directory / "pages-2.img").unlink()
        await brought_back(again, "1", tmp_path / "back")

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "small", str(small)], check=True)
    try:
        run(scenario())
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert same(directory, tmp_path / "back")

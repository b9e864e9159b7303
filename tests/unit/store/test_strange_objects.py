"""What a client without the store's key may put into a bucket: it ends nothing, and hides nothing of its neighbours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.node.failure import NoImage
from kybernate.store import lease
from kybernate.store.check import check
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import StoreDenied, StoreFull, StoreInvalid, StoreUnreachable
from kybernate.store.gc import collect
from kybernate.store.keys import StoreKey, make_key
from kybernate.store.named import named_object, named_recipe
from kybernate.store.objects import RemoteObjects
from kybernate.store.place import StorePlace, open_store
from kybernate.store.stats import stats
from kybernate.store.tiers.object import ObjectTier
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Transfer
from kybernate.store.writer import ImageSource, store
from tests.unit.store.stepped import MemoryFile, SteppedObjects

KEY = StoreKey(b"k" * 32)
DAY = 86400.0
NESTED = b"[" * 50_000
STRANGE = [NESTED, b'{"packs": ' + NESTED, b"", b"\xff\xfe", b"null", b"[]", b'"text"', b"{}", b'{"packs": 5}']


async def with_images(*ids: str) -> tuple[SteppedObjects, ChunkStore]:
    objects = SteppedObjects()
    target = await ChunkStore(objects, KEY).open(create=True)
    for id in ids:
        file = MemoryFile("file", f"content of image {id} ".encode() * 9)
        await store(target, ImageSource(id, "team-a", f"web-{id}", 1.0, b"manifest", (file,)), Transfer())
    return objects, target


async def packs_after_collections(objects: SteppedObjects) -> tuple[list[str], list[str]]:
    """Return the packs that three collections leave, and what they say."""
    said: list[str] = []
    for _ in range(3):
        objects.clock += 2 * DAY
        said += (await collect(await ChunkStore(objects, KEY).open())).problems
    return [name for name in objects.contents if name.startswith("packs/")], said


@pytest.mark.parametrize("content", STRANGE)
def test_strange_header_is_refused(content: bytes) -> None:
    async def scenario() -> None:
        objects, _ = await with_images()
        objects.contents["kybernate-store.json"] = (content, 1.0)
        with pytest.raises(StoreInvalid, match=r"kybernate-store\.json cannot be read"):
            await ChunkStore(objects, KEY).open()

    asyncio.run(scenario())


@pytest.mark.parametrize("content", STRANGE)
def test_strange_note_stops_no_upload_and_every_deletion(content: bytes) -> None:
    async def scenario() -> None:
        objects, target = await with_images("1")
        objects.contents["condemned/strange"] = (content, 1.0)
        file = MemoryFile("file", b"content of image 1 " * 9)
        await store(target, ImageSource("2", "team-a", "web-2", 1.0, b"", (file,)), again := Transfer())
        assert again.progress.known_bytes == 0, "a pack that may be in the note is relied on"
        await target.remove("team-a", "1")
        left, said = await packs_after_collections(objects)
        assert len(left) == 2
        assert all(words.startswith("condemned/strange cannot be read") for words in said)
        assert len(said) == 3
        del objects.contents["condemned/strange"]
        left, said = await packs_after_collections(objects)
        assert (len(left), said) == (1, [])

    asyncio.run(scenario())


@pytest.mark.parametrize("content", STRANGE)
def test_strange_lease_is_one_that_has_just_begun(content: bytes) -> None:
    async def scenario() -> None:
        objects, target = await with_images("1")
        await target.remove("team-a", "1")
        objects.contents["writers/strange"] = (content, objects.clock)
        left, said = await packs_after_collections(objects)
        assert (left, said) == ([], [])

    asyncio.run(scenario())


def test_recipe_that_cannot_be_read_hides_no_other() -> None:
    async def scenario() -> None:
        objects, target = await with_images("1", "2")
        objects.contents["images/team-a/0"] = (b"no recipe", 1.0)
        broken: dict[str, str] = {}
        found = [one.id async for one in target.recipes("team-a", broken=broken.__setitem__)]
        assert (found, list(broken)) == (["1", "2"], ["images/team-a/0"])
        assert (await named_recipe(target, "web-2")).id == "2"
        with pytest.raises(NoImage, match=r"named 'web-0'; 'images/team-a/0' cannot be read: a recipe was changed"):
            await named_recipe(target, "web-0")
        tier = ObjectTier(target, "s3://b")
        assert [held.ref.id async for held in tier.images()] == ["1", "2"]
        assert (await tier.find(Ref("team-a", "web-1", ""))).ref.id == "1"
        counted = await stats(target)
        assert (counted.images, list(counted.broken)) == (2, ["images/team-a/0"])
        looked = await check(target)
        assert (looked.images, list(looked.damaged)) == (3, ["images/team-a/0"])

    asyncio.run(scenario())


def test_collection_without_one_recipe_deletes_nothing_until_it_is_removed() -> None:
    async def scenario() -> None:
        objects, target = await with_images("1", "2")
        await target.remove("team-a", "1")
        objects.contents["images/team-a/2"] = (b"no recipe", 1.0)
        left, said = await packs_after_collections(objects)
        assert (len(left), len(set(said))) == (2, 1)
        assert said[0].startswith("images/team-a/2 cannot be read: a recipe was changed")
        name, _ = await named_object(target, "images/team-a/2")
        await objects.delete([name])
        assert await packs_after_collections(objects) == ([], [])

    asyncio.run(scenario())


def test_collection_that_lacks_a_chunk_deletes_nothing_and_names_the_image() -> None:
    async def scenario() -> None:
        objects, target = await with_images("1", "2", "3")
        await target.remove("team-a", "1")
        wanted = (await target.recipe("team-a", "2")).chunks()
        (pack,) = {found[0] for id in wanted if (found := target.index.find(id))}
        kept = objects.contents.pop(f"packs/{pack[:2]}/{pack}")
        left, said = await packs_after_collections(objects)
        assert len(left) == 2
        assert set(said) == {f"images/team-a/2 lacks {len(wanted)} chunks, which are in no pack"}
        objects.contents[f"packs/{pack[:2]}/{pack}"] = kept
        left, said = await packs_after_collections(objects)
        assert (len(left), said) == (2, [])

    asyncio.run(scenario())


class HidingObjects(SteppedObjects):
    """A list of all images lacks one in the middle; lists of namespaces have it."""

    hidden = ""

    async def list(self, prefix):  # type: ignore[no-untyped-def]
        async for one in super().list(prefix):
            if prefix != "images" or one.name != self.hidden:
                yield one


def test_image_that_one_list_hides_keeps_its_packs() -> None:
    async def scenario() -> None:
        plain, _ = await with_images("1", "2", "3")
        objects = HidingObjects()
        objects.contents, objects.clock, objects.hidden = plain.contents, plain.clock, "images/team-a/2"
        left, said = await packs_after_collections(objects)
        assert (len(left), said) == (3, [])

    asyncio.run(scenario())


def test_writer_that_one_list_hides_is_living() -> None:
    class Hiding(SteppedObjects):
        hides = True

        async def list(self, prefix):  # type: ignore[no-untyped-def]
            hides, self.hides = self.hides and prefix == "writers", self.hides and prefix != "writers"
            async for one in super().list(prefix):
                if not hides:
                    yield one

    async def scenario() -> None:
        objects = Hiding()
        objects.contents["writers/1"] = (b'{"began": 5.0}', objects.clock)
        assert await lease.living(objects, objects.clock, end=False) == {"1": 5.0}

    asyncio.run(scenario())


def test_index_that_cannot_be_read_is_done_without_and_named() -> None:
    async def scenario() -> None:
        objects, target = await with_images("1")
        objects.contents["index/" + "0" * 64] = (b"no index", objects.clock)
        await store(target, ImageSource("2", "team-a", "web-2", 1.0, b"", ()), Transfer())
        other = await ChunkStore(objects, KEY).open()
        assert (await check(other)).problems == [
            f"index/{'0' * 64}: an index was changed, was cut, or is of another key"
        ]
        left, problems = await packs_after_collections(objects)
        assert (len(left), problems) == (1, [])

    asyncio.run(scenario())


@pytest.fixture
def place(tmp_path: Path) -> StorePlace:
    make_key(tmp_path / "key")
    return StorePlace(f"file://{tmp_path}/store", tmp_path / "key")


@pytest.mark.parametrize("name", ["kybernate-store.json", "condemned/1", "index/1", "images/team-a/1", "packs/aa/aa"])
def test_object_of_gigabytes_is_not_read(place: StorePlace, tmp_path: Path, name: str) -> None:
    """Files with holes stand for them: only their size is looked at, or the test takes their memory."""

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        large = tmp_path / "store" / name
        large.parent.mkdir(parents=True, exist_ok=True)
        with large.open("wb") as file:
            file.truncate(1 << 42)
        read: dict[str, Callable[[], object]] = {
            "kybernate-store.json": lambda: open_store(place).open(),
            "condemned/1": lambda: collect(target),
            "index/1": lambda: check(target),
            "images/team-a/1": lambda: collect(target),
            "packs/aa/aa": lambda: check(target, read=True),
        }
        try:
            said = json.dumps((await read[name]()).problems)  # type: ignore[misc]
        except StoreInvalid as error:
            said = str(error)
        assert ("not a pack" if name.startswith("packs") else f"{1 << 42} bytes") in said

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("<Code>RequestTimeTooSkewed</Code>", StoreDenied, "the clocks of this node and of the service differ"),
        ("<Code>ExpiredToken</Code>", StoreDenied, "the temporary credentials have expired"),
        ("status 400: <Code>ObjectLocked</Code>", StoreDenied, "the bucket's object lock refuses this"),
        ("key a: Access Denied (code: AccessDenied)", StoreDenied, "Access Denied"),
        ("<Code>NoSuchBucket</Code>", StoreUnreachable, "the bucket does not exist"),
        ("<Code>QuotaExceeded</Code>", StoreFull, "no room for"),
        ("404: <Code>XAdminUserNotFound</Code>", StoreDenied, "XAdminUserNotFound"),
        ("something else", StoreUnreachable, "something else"),
        (
            "code: 500: <?xml?>\n<Error><Code>Odd</Code><Message>It is</Message></Error>",
            StoreUnreachable,
            "500: Odd: It is",
        ),
    ],
)
def test_answers_of_services_are_said_in_words(words: str, error: type[Exception], said: str) -> None:
    from obstore.exceptions import GenericError
    from obstore.store import MemoryStore

    class Refusing(RemoteObjects):
        async def refused(self) -> None:
            with self._translated("one"):
                raise GenericError(words)

    with pytest.raises(error, match=said):
        asyncio.run(Refusing(MemoryStore(), title="s3://b").refused())


def test_file_without_certificates_is_refused(place: StorePlace, tmp_path: Path) -> None:
    from dataclasses import replace

    (tmp_path / "ca.pem").write_text("no certificates")
    with pytest.raises(StoreInvalid, match=r"ca\.pem has no certificates in PEM"):
        open_store(replace(place, ca=tmp_path / "ca.pem"))

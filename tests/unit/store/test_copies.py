"""An arrival whose source fails in the middle continues from another copy, and no byte of it is written twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Failure
from kybernate.store.errors import ChunkDamaged, ImageDamaged, StoreUnreachable
from kybernate.store.movement.moving import ImageNowhere
from kybernate.store.place import StorePlace, open_store
from kybernate.store.reader import Sink
from kybernate.store.streaming import copies as module
from kybernate.store.streaming.bring import bring
from kybernate.store.streaming.copies import Copies, CopyPlace
from kybernate.store.tiers.directory import DirectorySource
from kybernate.store.tiers.object import ObjectTier
from kybernate.store.tiers.tier import Have, Ref, Source
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.checkpoint.image.verification import problems_of
from kybernate_shim.vram_io.arrival import Arrival, arrival_in
from kybernate_shim.vram_io.errors import VramError
from tests.unit.store.test_streaming import VRAM
from tests.unit.store.test_streaming import image as image
from tests.unit.store.test_streaming import place as place
from tests.unit.store.test_streaming import stored as stored

REF = Ref("", "image", "one")
MIB = 1 << 20
AWAY = StoreUnreachable("the service is away")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@dataclass
class Breaking:
    """A copy that fails after some requests: by an error, or, without one, by silence."""

    source: Source
    after: int
    error: Exception | None
    closed: int = 0

    directory = None

    @property
    def ref(self) -> Ref:
        return self.source.ref

    @property
    def manifest(self) -> bytes:
        return self.source.manifest

    async def pour(self, sink: Sink, transfer: Transfer, have: Have) -> None:
        breaking, pace = self, transfer.pace

        class Limited(Transfer):
            async def pace(self, count: int) -> None:
                breaking.after -= 1
                if breaking.after < 0:
                    if breaking.error is None:
                        await asyncio.sleep(3600)
                    raise breaking.error or AssertionError
                await pace(count)

        await self.source.pour(sink, Limited(parallel=1), have)

    async def close(self) -> None:
        self.closed += 1


def at(title: str, source: Source | Failure) -> CopyPlace:
    async def opened() -> Source:
        if isinstance(source, Failure):
            raise source
        return source

    return CopyPlace(title, opened)


def directory(image: Path) -> DirectorySource:
    found = read_image(image)
    return DirectorySource(REF, found.content, image, found.manifest)


@asynccontextmanager
async def stored_at(place: StorePlace) -> AsyncIterator[Source]:
    store = await open_store(place).open()
    try:
        yield await ObjectTier(store, place.url).open(REF)
    finally:
        store.close()


class Counting:
    """A sink that keeps what it is given, and how often each piece was."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.files: dict[str, bytearray] = {}
        self.given: Counter[tuple[str, int]] = Counter()
        self._failure = failure

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        if self._failure is not None:
            raise self._failure
        self._take(file, offset, bytes(content))

    def zeros(self, file: str, offset: int, size: int) -> None:
        self._take(file, offset, bytes(size))

    def _take(self, file: str, offset: int, content: bytes) -> None:
        whole = self.files.setdefault(file, bytearray())
        whole.extend(bytes(max(0, offset + len(content) - len(whole))))
        whole[offset : offset + len(content)] = content
        self.given.update((file, at) for at in range(offset, offset + len(content), 512))

    def is_whole(self, image: Path) -> bool:
        """Return whether it has all of an image, each byte once."""
        expected = {path.name: path.read_bytes() for path in image.iterdir() if path.name != NAME}
        return self.files == expected and max(self.given.values()) == 1


async def poured(copies: Copies, sink: Sink, transfer: Transfer | None = None) -> list[int]:
    """Return the numbers of the origins that continued."""
    continued: list[int] = []
    await copies.open()
    await copies.coming().pour(sink, transfer or Transfer(), continued.append)
    await copies.close()
    return continued


@pytest.mark.parametrize(
    ("error", "stored_first"), [(AWAY, True), (ChunkDamaged("a bit"), True), (OSError("the disk"), False)]
)
def test_second_copy_gives_what_the_first_has_not(
    stored: StorePlace, image: Path, error: Exception, stored_first: bool
) -> None:
    async def scenario() -> None:
        async with stored_at(stored) as one:
            first, second = (one, directory(image)) if stored_first else (directory(image), one)
            breaking, sink, transfer = Breaking(first, 2, error), Counting(), Transfer()
            copies = Copies(REF, [at("first", breaking), at("away", AWAY), at("second", second)])
            assert await poured(copies, sink, transfer) == [2]
            assert sink.is_whole(image)
            assert breaking.closed == 1
            assert transfer.progress.known_bytes > 0, "all was read again"
            assert transfer.progress.done_bytes == transfer.progress.total_bytes

    run(scenario())


def test_silent_copy_is_left_for_another_one(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)

    async def scenario() -> None:
        sink = Counting()
        copies = Copies(REF, [at("silent", Breaking(directory(image), 4, None)), at("second", directory(image))])
        assert await poured(copies, sink) == [1]
        assert sink.is_whole(image)

    run(scenario())


def test_place_that_does_not_answer_is_passed_over(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.05)

    async def silent() -> Source:
        await asyncio.sleep(3600)
        raise AssertionError

    async def scenario() -> None:
        sink = Counting()
        copies = Copies(REF, [CopyPlace("gone", silent), at("second", directory(image))])
        assert await poured(copies, sink) == []
        assert sink.is_whole(image)

    run(scenario())


def test_image_without_a_copy_that_can_be_read_is_nowhere(image: Path, tmp_path: Path) -> None:
    """Each reason is named: another image is no copy, and none is begun twice."""
    other = tmp_path / "other"
    other.mkdir()
    content = (image / NAME).read_bytes()
    foreign = DirectorySource(REF, content.replace(b'"one"', b'"two"'), other, read_image(image).manifest)

    async def scenario() -> None:
        breaking = Breaking(directory(image), 1, OSError("the disk"))
        copies = Copies(REF, [at("first", breaking), at("other", foreign), at("third", AWAY)])
        with pytest.raises(ImageNowhere, match=r"(?s)first: the disk.*other: it has another.*third: the service is"):
            await poured(copies, Counting())
        await copies.close()
        assert breaking.closed == 1

    run(scenario())


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("the operation was cancelled")])
def test_what_fails_at_the_receiver_is_no_copys_fault(image: Path, error: Exception) -> None:
    async def scenario() -> None:
        def cancelled(progress: object) -> None:
            if isinstance(error, RuntimeError):
                raise error

        copies = Copies(REF, [at("first", directory(image)), at("second", directory(image))])
        await copies.open()
        sink = Counting(error if isinstance(error, OSError) else None)
        with pytest.raises(type(error), match=str(error)):
            await copies.coming().pour(sink, Transfer(report=cancelled), lambda number: pytest.fail("it continued"))

    run(scenario())


def test_restore_that_has_begun_goes_on_with_the_second_copy(stored: StorePlace, image: Path, tmp_path: Path) -> None:
    """CRIU's files are there, and half of the VRAM, when the store fails: its reader sees nothing but another name."""
    target = tmp_path / "back"

    async def scenario() -> None:
        async with stored_at(stored) as one:
            copies = Copies(REF, [at("object s3://a", Breaking(one, 2, AWAY)), at("peer b", directory(image))])
            await copies.open()
            records: list[Arrival] = []
            begun: Callable[[], object] = lambda: records.append(_record(target))  # noqa: E731  # a value
            await bring(copies.coming(), target, Transfer(), transient=False, ready=begun)
            records[0].wait_all()
            assert records[0].source == "object s3://a, then peer b"
            assert records[0].bytes_here == (image / VRAM).stat().st_size

    run(scenario())
    assert not problems_of(target, read_image(target).manifest)


def test_restore_is_told_of_every_copy_that_failed(stored: StorePlace, image: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stored_at(stored) as one:
            places = [at("object s3://a", Breaking(one, 2, AWAY)), at("peer b", Breaking(directory(image), 1, AWAY))]
            copies = Copies(REF, places)
            await copies.open()
            records: list[Arrival] = []
            work: Awaitable[None] = bring(
                copies.coming(),
                tmp_path / "back",
                Transfer(),
                transient=False,
                ready=lambda: records.append(_record(tmp_path / "back")),
            )
            with pytest.raises(ImageNowhere):
                await work
            with pytest.raises(VramError, match=r"(?s)from object s3://a, then peer b: .*s3://a: the serv.*peer b: "):
                records[0].wait_all()

    run(scenario())
    assert not (tmp_path / "back").exists()


def test_damaged_bytes_of_another_node_do_not_become_an_image(image: Path, tmp_path: Path) -> None:
    """Its bytes have no digests of their own: a restore compares them, and so does the image that stays."""
    with (image / VRAM).open("r+b") as stream:
        stream.seek(3 * MIB)
        stream.write(b"not what was written")

    async def scenario() -> None:
        copies = Copies(REF, [at("peer a", directory(image))])
        await copies.open()
        with pytest.raises(ImageDamaged, match=VRAM):
            await bring(copies.coming(), tmp_path / "back", Transfer(), transient=False, ready=lambda: None)

    run(scenario())
    assert not (tmp_path / "back").exists()


def _record(directory: Path) -> Arrival:
    found = arrival_in(directory)
    assert found is not None
    return found

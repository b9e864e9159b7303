"""An image arrives from a store: CRIU's files first, the record as its restore reads it, and what a failure leaves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest

from kybernate.node.failure import Failure
from kybernate.store import images
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, StoreUnreachable
from kybernate.store.format.recipe import Recipe
from kybernate.store.keys import make_key
from kybernate.store.objects import RemoteObjects
from kybernate.store.parts import WholeParts
from kybernate.store.place import StorePlace, open_store
from kybernate.store.streaming import arriving as module
from kybernate.store.streaming import bring
from kybernate.store.streaming.arriving import arriving_at
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import ARRIVING, NAME, File, encode
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, read_for_restore, read_image
from kybernate_shim.checkpoint.image.verification import problems_of
from kybernate_shim.errors import NoRoom
from kybernate_shim.vram_io import file_digests
from kybernate_shim.vram_io.arrival import Arrival, arrival_in
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.image_files import VramFile
from kybernate_shim.vram_io.thread_pool import CopyOptions
from tests.fakes.images import CONTENTS, PATTERN

VRAM = "kybernate-vram-1-0.bin"
SIZE = 40 << 20
FILES = tuple(File(name, len(data), f"sha256:{sha256(data).hexdigest()}") for name, data in CONTENTS.items())


@pytest.fixture
def place(tmp_path: Path) -> StorePlace:
    make_key(tmp_path / "store.key")
    return StorePlace(f"file://{tmp_path}/store", tmp_path / "store.key")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image with 40 MiB of VRAM, in two packs."""
    directory = tmp_path / "image"
    directory.mkdir(mode=0o700)
    for name, content in CONTENTS.items():
        (directory / name).write_bytes(content)
    (directory / VRAM).write_bytes(os.urandom(SIZE - (2 << 20)) + bytes(2 << 20))
    text = file_digests.of_file(directory / VRAM, 2 << 20, CopyOptions(threads=2))
    vram = VramFile(1, VRAM, 0x7F0000000000, SIZE, SIZE, text)
    manifest = replace(PATTERN, id="one", vram=(vram,), files=(File(VRAM, SIZE, text), *FILES))
    (directory / NAME).write_bytes(encode(manifest))
    return directory


@pytest.fixture
def stored(place: StorePlace, image: Path) -> StorePlace:
    async def put() -> None:
        store = await open_store(place).open(create=True)
        await images.put(store, image, Transfer(level=0))
        store.close()

    asyncio.run(put())
    return place


async def the_image(store: ChunkStore) -> Recipe:
    return await store.recipe("", "one")


def into(directory: Path) -> Callable[[Recipe], Path]:
    return lambda recipe: directory


class HeldObjects(WholeParts):
    """The objects of a store, of which the last pack that is asked for comes only after `release`."""

    ranged = True

    def __init__(self, objects: RemoteObjects) -> None:
        self._objects = objects
        self.seen: list[str] = []
        self.release = threading.Event()

    def is_held(self, name: str) -> bool:
        if name.startswith("packs/"):
            self.seen = list(dict.fromkeys([*self.seen, name]))
        return name in self.seen[1:]

    async def get_range(self, name: str, start: int, length: int) -> bytes:
        if self.is_held(name):
            await asyncio.to_thread(self.release.wait, 30)
        return await self._objects.get_range(name, start, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


def test_restore_may_begin_before_vram_is_there(
    stored: StorePlace, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pack is held back: CRIU's files are complete, and only a restore takes the directory for an image."""
    opened = open_store(stored)
    held = HeldObjects(cast("RemoteObjects", opened.objects))
    opened.objects = held
    monkeypatch.setattr(module, "open_store", lambda place: opened)
    target = tmp_path / "back"
    with arriving_at(stored, the_image, Transfer(parallel=1), into(target)) as arriving:
        assert arriving.directory == target
        with pytest.raises(CheckpointNotFound):
            read_image(target)
        found = read_for_restore(target)
        assert found.arriving
        assert not problems_of(target, found.manifest, vram=False)
        record = arrival_in(target)
        assert record is not None
        assert record.source == f"disk {stored.url}"
        assert record.bytes_here < SIZE
        held.release.set()
        arriving.wait()
        record.wait_all()
    assert not read_for_restore(target).arriving
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in image.iterdir())
    assert not problems_of(target, read_image(target).manifest)


def test_failed_arrival_leaves_nothing(stored: StorePlace, tmp_path: Path) -> None:
    for pack in (tmp_path / "store/packs").rglob("*/*"):
        content = bytearray(pack.read_bytes())
        content[len(content) // 2] ^= 1
        pack.write_bytes(content)
    target, said = tmp_path / "back", []

    def restore() -> None:
        with arriving_at(stored, the_image, Transfer(), into(target)) as arriving:
            record = arrival_in(target)
            assert record is not None
            try:
                record.wait_all()
            except VramError as error:
                said.append(str(error))
            arriving.wait()

    with pytest.raises(ChunkDamaged, match="is damaged in all packs"):
        restore()
    assert not said or "is damaged in all packs" in said[0]  # where the damage is among CRIU's files, no restore begins
    assert not target.exists()


class NotRestored(Failure):
    """What a restore raises that fails for a reason of its own."""


def test_restore_that_fails_by_itself_is_what_is_told(stored: StorePlace, tmp_path: Path) -> None:
    failure = NotRestored("the GPU is full")

    def restore() -> None:
        with arriving_at(stored, the_image, Transfer(), into(tmp_path / "back")) as arriving:
            arriving.wait()
            raise failure

    async def by_an_agent() -> None:
        store = await open_store(stored).open()
        coming = bring.of_recipe(store, await the_image(store), "disk")
        async with bring.arriving(coming, tmp_path / "again", Transfer(), transient=True):
            raise failure

    for way in (restore, lambda: asyncio.run(by_an_agent())):
        with pytest.raises(NotRestored) as caught:
            way()
        assert caught.value is failure
        assert failure.__cause__ is None, "who follows the causes would never end"


def test_block_that_is_left_early_ends_the_transfer(stored: StorePlace, tmp_path: Path) -> None:
    target = tmp_path / "back"
    slow = Transfer(parallel=1, bytes_per_second=1 << 20)
    with arriving_at(stored, the_image, slow, into(target)):
        assert (target / ARRIVING).exists()
    assert not target.exists()


def test_image_without_vram_arrives_as_well(place: StorePlace, image: Path, tmp_path: Path) -> None:
    (image / VRAM).unlink()
    (image / NAME).write_bytes(encode(replace(PATTERN, id="one", files=FILES)))

    async def put() -> None:
        store = await open_store(place).open(create=True)
        await images.put(store, image, Transfer())
        store.close()

    asyncio.run(put())
    with arriving_at(place, the_image, Transfer(), into(tmp_path / "back")) as arriving:
        assert read_for_restore(tmp_path / "back").manifest.id == "one"
        arriving.wait()
    assert not problems_of(tmp_path / "back", read_image(tmp_path / "back").manifest)


def test_place_that_is_taken_stays(stored: StorePlace, image: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), arriving_at(stored, the_image, Transfer(), into(image)):
        pass
    assert not problems_of(image, read_image(image).manifest)


def test_no_room_is_said_before_anything_moves(
    stored: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, needed: int, *, what: str) -> None:
        raise NoRoom(f"{directory}: no room for {needed} bytes of the {what}")

    monkeypatch.setattr(bring, "require_space", full)
    with (
        pytest.raises(bring.Failure, match="no room for"),
        arriving_at(stored, the_image, Transfer(), into(tmp_path / "back")),
    ):
        pass
    assert not (tmp_path / "back").exists()


def test_server_that_goes_away_is_named_in_the_record(
    stored: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(HeldObjects):
        async def get_range(self, name: str, start: int, length: int) -> bytes:
            if self.is_held(name):
                await asyncio.to_thread(self.release.wait, 30)
                raise StoreUnreachable("the service is away")
            return await self._objects.get_range(name, start, length)

    opened = open_store(stored)
    leaving = opened.objects = Leaving(cast("RemoteObjects", opened.objects))
    monkeypatch.setattr(module, "open_store", lambda place: opened)
    records: list[Arrival] = []

    def restore() -> None:
        with arriving_at(stored, the_image, Transfer(parallel=1), into(tmp_path / "back")) as arriving:
            records.append(cast("Arrival", arrival_in(tmp_path / "back")))
            leaving.release.set()
            arriving.wait()

    with pytest.raises(StoreUnreachable, match="the service is away"):
        restore()
    with pytest.raises(VramError, match=r"the rest of the image did not arrive from .*: the service is away"):
        records[0].wait_all()
    assert not (tmp_path / "back").exists()

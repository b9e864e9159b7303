"""Images as directories of files: of a tmpfs (tier 1), or of the node's disk (tier 2).

An image arrives in a directory with a name of its own next to its place, and is renamed when all of it is there, on the
disk and compared with its manifest. What a killed transfer has left there is where the next one continues.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kybernate.node.deleting import delete
from kybernate.node.failure import NoImage, Refused
from kybernate.node.filesystem import space_of
from kybernate.node.images import places_below
from kybernate.store.errors import ImageDamaged, StoreFull
from kybernate.store.in_thread import in_thread
from kybernate.store.reader import Sink
from kybernate.store.sink import DirectorySink
from kybernate.store.tiers import copying
from kybernate.store.tiers.arrived import NAME as RECORD
from kybernate.store.tiers.arrived import Arrived
from kybernate.store.tiers.tier import IMAGE_DIFFERS_ADVICE, Have, Held, Ref, Room, Source
from kybernate.store.transfer import Transfer
from kybernate_shim import errors
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest, decode
from kybernate_shim.checkpoint.image.store import (
    CheckpointInvalid,
    CheckpointNotFound,
    Image,
    listed,
    read_image,
    require_space,
)
from kybernate_shim.checkpoint.image.verification import problems_of, verify
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.private_files import FILE_MODE, make_directory

ARRIVING = ".kybernate-arriving-"  # begins the name of a directory that an image comes into; no list shows it
READ_BYTES = 2 << 20  # that are given to a sink in one call


@dataclass(frozen=True)
class DirectoryTier:
    """The images below `root`. `durable`: what it has survives a power failure. `quota` is in bytes, 0 for none."""

    name: str
    level: int
    root: Path
    durable: bool = True
    quota: int = 0

    async def images(self) -> AsyncIterator[Held]:
        for image in await asyncio.to_thread(self._images):
            yield image

    async def find(self, ref: Ref) -> Held:
        return _held(ref, await asyncio.to_thread(self._read, ref))

    async def open(self, ref: Ref) -> Source:
        image = await asyncio.to_thread(self._read, ref)
        return DirectorySource(ref, image.content, image.path, image.manifest)

    async def receive(self, source: Source, transfer: Transfer) -> Held:
        place = self._place(source.ref)
        if os.path.lexists(place):
            return await self._that_is_there(source)
        manifest = decode(source.manifest)
        arriving = self._arriving(source.ref)
        await in_thread(self._prepare, arriving, manifest)
        arrived = Arrived(arriving, source.manifest, tuple(file.name for file in manifest.stored_files))
        try:
            if not arrived.continues:
                _empty(arriving)
            await self._arrive(source, manifest, arriving, arrived, transfer)
        except ImageDamaged:
            shutil.rmtree(arriving, ignore_errors=True)
            raise
        finally:
            arrived.close()
        await in_thread(self._publish, arriving, place, manifest, source.manifest)
        return _held(source.ref, await asyncio.to_thread(self._read, source.ref))

    async def discard(self, ref: Ref) -> None:
        await asyncio.to_thread(shutil.rmtree, self._arriving(ref), ignore_errors=True)

    async def verify(self, ref: Ref) -> None:
        await asyncio.to_thread(self._verify, ref)

    async def remove(self, ref: Ref) -> None:
        await asyncio.to_thread(self._delete, ref)

    async def room(self) -> Room:
        used = sum(image.bytes for image in await asyncio.to_thread(self._images))
        space = space_of(self.root)
        if not self.quota:
            return Room(space.total, space.free, used)
        return Room(min(space.total, self.quota), max(0, min(space.free, self.quota - used)), used)

    # -- receiving

    async def _that_is_there(self, source: Source) -> Held:
        image = await asyncio.to_thread(self._read, source.ref)
        if image.content != source.manifest:
            raise Refused(
                f"{image.path} is another image of that name", state="it is as it was", advice=IMAGE_DIFFERS_ADVICE
            )
        return _held(source.ref, image)

    def _prepare(self, arriving: Path, manifest: Manifest) -> None:
        """Make the directory that the image comes into, where there is room for what is missing."""
        make_directory(arriving)
        there = sum(path.stat().st_blocks * 512 for path in arriving.iterdir())
        missing = max(0, sum(file.size for file in manifest.stored_files) - there)
        try:
            require_space(arriving, missing, what="image")
        except NoRoom as error:
            raise StoreFull(str(error), state="what had arrived stays for the next attempt") from error
        used = sum(image.bytes for image in self._images()) if self.quota else 0
        if self.quota and used + missing > self.quota:
            raise StoreFull(
                f"{self.root}: images take {used} bytes of the quota of {self.quota}, and this one needs {missing}",
                state="nothing was copied",
                advice="raise the tier's quota, or evict images",
            )

    async def _arrive(
        self, source: Source, manifest: Manifest, arriving: Path, arrived: Arrived, transfer: Transfer
    ) -> None:
        for file in manifest.stored_files:
            _make(arriving / file.name, file.size)
        if source.directory is not None:
            await copying.copy(source.directory, arriving, manifest, arrived, transfer)
            return
        sink = DirectorySink(arriving, {file.name: file.size for file in manifest.stored_files})
        try:
            await source.pour(_Noting(sink, arrived), transfer, arrived)
        finally:
            sink.close()
        await asyncio.to_thread(require_whole, arriving, manifest)

    def _publish(self, arriving: Path, place: Path, manifest: Manifest, content: bytes) -> None:
        """Make it an image: files, manifest, then the name."""
        (arriving / RECORD).unlink()
        sink = DirectorySink(arriving, {file.name: file.size for file in manifest.stored_files})
        try:
            sink.finish(content, durable=self.durable)
        finally:
            sink.close()
        arriving.rename(place)
        if self.durable:
            sync(place.parent)

    def _verify(self, ref: Ref) -> None:
        """Compare every byte; of an encrypted image what is in its files, for which the node needs the key."""
        image = self._read(ref)
        if image.manifest.encryption is None:
            return require_whole(image.path, image.manifest)
        try:
            problems = verify(image.path, encryption_key=Config.load().encryption_key)
        except (CheckpointInvalid, errors.Refused) as error:
            raise ImageDamaged(f"{image.path} cannot be compared with its manifest: {error}") from error
        if problems:
            raise ImageDamaged(f"{image.path}: files are not as the manifest says: {listed(problems)}")
        return None

    def _delete(self, ref: Ref) -> None:
        """Remove the image, unless another one has come to its place. What a crash has left of it is removed, too."""
        place = self._place(ref)
        if os.path.lexists(place / NAME):
            self._read(ref)
        delete(place, ref.id)

    # -- what is there

    def _place(self, ref: Ref) -> Path:
        return self.root / ref.path

    def _arriving(self, ref: Ref) -> Path:
        place = self._place(ref)
        return place.with_name(f"{ARRIVING}{place.name}")

    def _read(self, ref: Ref) -> Image:
        try:
            image = read_image(self._place(ref))
        except (CheckpointNotFound, CheckpointInvalid) as error:
            raise NoImage(f"tier {self.name} has no image {ref}: {error}") from error
        if ref.id and image.manifest.id != ref.id:
            raise NoImage(f"tier {self.name} has another image of the name {ref}, {image.manifest.id}")
        return image

    def _images(self) -> list[Held]:
        found = []
        for place in places_below(self.root):
            try:
                image = read_image(place)
            except (CheckpointNotFound, CheckpointInvalid):
                continue  # `kybernate images` shows what is wrong with it
            first, slash, rest = str(place.relative_to(self.root)).partition("/")
            found.append(_held(Ref(first, rest, "") if slash else Ref("", first, ""), image))
        return found


@dataclass(frozen=True)
class DirectorySource:
    """An image in a directory."""

    ref: Ref
    manifest: bytes
    directory: Path
    decoded: Manifest

    async def pour(self, sink: Sink, transfer: Transfer, have: Have) -> None:
        transfer.begins(sum(file.size for file in self.decoded.stored_files))
        for file in self.decoded.stored_files:
            with (self.directory / file.name).open("rb") as stream:
                for offset in range(0, file.size, READ_BYTES):
                    size = min(READ_BYTES, file.size - offset)
                    if have.has(file.name, offset, size):
                        transfer.done(done_bytes=size, known_bytes=size)
                        continue
                    await transfer.pace(size)
                    content = await in_thread(os.pread, stream.fileno(), size, offset)
                    if len(content) != size:
                        raise ImageDamaged(f"{self.directory / file.name} is shorter than {file.size} bytes")
                    await in_thread(sink.write, file.name, offset, content)
                    transfer.done(done_bytes=size, sent_bytes=size)

    async def close(self) -> None:
        return None


class _Noting:
    """A sink that notes what it has written."""

    def __init__(self, sink: Sink, arrived: Arrived) -> None:
        self._sink, self._arrived = sink, arrived

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        self._sink.write(file, offset, content)
        self._arrived.add(file, offset, len(content))

    def zeros(self, file: str, offset: int, size: int) -> None:
        self._sink.zeros(file, offset, size)


def _held(ref: Ref, image: Image) -> Held:
    return Held(Ref(ref.namespace, ref.name, image.manifest.id), image.manifest.bytes, str(image.path))


def _make(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.ftruncate(descriptor, size)  # what is zeros stays a hole
    finally:
        os.close(descriptor)


def _empty(arriving: Path) -> None:
    """Remove what an attempt before the last start of the node, or of another image, has left."""
    for path in arriving.iterdir():
        if path.name != RECORD:
            path.unlink()


def require_whole(directory: Path, manifest: Manifest) -> None:
    """Compare what has arrived with the manifest. An encrypted image is compared when it is decrypted."""
    if manifest.encryption is not None:
        return
    problems = [one for one in problems_of(directory, manifest) if one.file != RECORD]
    if problems:
        raise ImageDamaged(f"{directory}: {len(problems)} files are not as the manifest says: {listed(problems)}")

"""Stores an image: chunks that the store does not have go into packs, then the index, and the recipe last.

An upload that is interrupted at any point leaves packs, which the next upload of the same image finds and does not send
again. Nothing that has no recipe exists.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kybernate.store import notes
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format import index as indexes
from kybernate.store.format import pack as packs
from kybernate.store.format import recipe as recipes
from kybernate.store.format.pack import Pack, PackBuilder, Place
from kybernate.store.format.recipe import Piece, Recipe, StoredFile
from kybernate.store.format.sealing import Sealed, chunk_id, seal
from kybernate.store.in_thread import in_thread
from kybernate.store.lease import Lease, leased
from kybernate.store.source import ImageFile
from kybernate.store.transfer import Transfer

ZEROS = bytes(2 << 20)
BATCH = 8  # chunks that one call of a thread prepares
AHEAD = 2  # batches that are prepared while packs are sent
THREADS = min(AHEAD + 1, os.cpu_count() or 1)  # that prepare them
PACKS_OF_INDEX = 32  # a GiB: what a writer that is killed has sent in vain, at most


@dataclass(frozen=True)
class ImageSource:
    """An image that is to be stored: its manifest's bytes, and its files in the order of their need at a restore."""

    id: str
    namespace: str
    name: str
    created: float
    manifest: bytes
    files: tuple[ImageFile, ...]


@dataclass(frozen=True)
class _Prepared:
    """One piece of a file, and what is to be stored of it: nothing where it is zeros or known."""

    file: int
    piece: Piece
    sealed: Sealed | None


async def store(target: ChunkStore, source: ImageSource, transfer: Transfer) -> Recipe:
    """Store an image, and return its recipe. Raises Failure, StoreUnreachable, StoreDenied, StoreFull, OSError."""
    transfer.begins(sum(file.size for file in source.files))
    async with leased(target.objects) as lease:
        # In this order: what is condemned from now on is not deleted while the lease lives, and of what was condemned
        # before nothing is used. An index may name packs that are gone, so those that are there are listed.
        noted = await notes.read(target.objects)
        there = await target.packs()
        # Any pack may be in a note that cannot be read: then all is sent.
        reliable = set[str]() if notes.problems(noted) else there.keys() - notes.condemned(noted).keys()
        await target.refresh()
        recipe = await _Upload(target, transfer, frozenset(reliable)).run(source)
        await _publish(target, recipe, lease)
    return recipe


async def _publish(target: ChunkStore, recipe: Recipe, lease: Lease) -> None:
    """Make the image exist, in one step that fails where a collection has ended this writer (lease.py)."""
    content = await asyncio.to_thread(recipes.encode, target.key, recipe)
    await target.objects.put(lease.draft, content)
    await lease.require()
    try:
        await target.objects.copy(lease.draft, recipes.object_name(recipe.namespace, recipe.id))
    except ObjectMissing as error:
        raise lease.lost() from error  # a collection has ended this writer since


class _Upload:
    """One image on its way. Packs are sent in parallel while the next chunks are read."""

    def __init__(self, target: ChunkStore, transfer: Transfer, reliable: frozenset[str]) -> None:
        self._target = target
        self._reliable = reliable
        self._transfer = transfer
        self._link = Link()
        self._builder = PackBuilder(target.key)
        self._packs: list[tuple[str, tuple[Place, ...]]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._new: set[bytes] = set()  # chunks of this upload that are in packs, or on their way

    async def run(self, source: ImageSource) -> Recipe:
        pieces: list[list[Piece]] = [[] for _ in source.files]
        try:
            async for batch in self._prepared(source):
                for one in batch:
                    pieces[one.file].append(one.piece)
                    await self._take(one)
            await self._finish()
        except BaseException:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)
            await self._note_what_is_there()
            raise
        files = tuple(StoredFile(file.name, tuple(found)) for file, found in zip(source.files, pieces, strict=True))
        return Recipe(source.id, source.namespace, source.name, source.created, source.manifest, files)

    async def _take(self, one: _Prepared) -> None:
        size, id = one.piece
        sealed = one.sealed
        if not id:
            self._transfer.done(done_bytes=size, zero_bytes=size, chunks=1)
        elif sealed is None or id in self._new:
            self._transfer.done(done_bytes=size, known_bytes=size, chunks=1)
        else:
            self._new.add(id)
            self._builder.add(sealed)
            self._transfer.done(done_bytes=size, chunks=1)
            if self._builder.full:
                await self._send()

    async def _send(self) -> None:
        """Begin to send the pack; wait where enough are on their way, so that memory is bounded."""
        pack, self._builder = self._builder.finish(), PackBuilder(self._target.key)
        while len(self._sending) >= self._transfer.parallel:
            await self._wait(asyncio.FIRST_COMPLETED)
        self._sending.add(asyncio.create_task(self._put(pack)))

    async def _put(self, pack: Pack) -> None:
        await self._transfer.pace(len(pack.content))
        with self._link.sending(len(pack.content)):
            await self._target.objects.put(packs.object_name(pack.name), pack.content)
        self._packs.append((pack.name, pack.places))
        self._transfer.done(sent_bytes=len(pack.content))
        if len(self._packs) >= PACKS_OF_INDEX:
            await self._index()

    async def _wait(self, when: str) -> None:
        if self._sending:
            done, self._sending = await asyncio.wait(self._sending, return_when=when)
            for task in done:
                task.result()

    async def _finish(self) -> None:
        if self._builder:
            await self._send()
        while self._sending:
            await self._wait(asyncio.FIRST_EXCEPTION)
        await self._index()

    async def _index(self) -> None:
        sent, self._packs = self._packs, []
        if not sent:
            return
        content = indexes.encode(self._target.key, sent)
        name = indexes.name_of(content)
        try:
            await self._target.objects.put(name, content)
        except BaseException:
            self._packs += sent
            raise
        self._target.index.add(sent, loaded=name)

    async def _note_what_is_there(self) -> None:
        """After a failure, index the packs that were sent, so that the next attempt finds them."""
        with suppress(Exception):  # the first error counts; packs without an index are found by `store check`
            await self._index()

    # -- reading

    async def _prepared(self, source: ImageSource) -> AsyncIterator[list[_Prepared]]:
        """Yield batches of prepared chunks in order, a few of them ahead."""
        running: list[asyncio.Task[list[_Prepared]]] = []
        batches = _batches(source)
        try:
            for batch in batches:
                running.append(asyncio.create_task(in_thread(self._prepare, source, batch)))
                if len(running) > AHEAD:
                    yield await running.pop(0)
            while running:
                yield await running.pop(0)
        finally:
            await asyncio.gather(*running, return_exceptions=True)

    def _prepare(self, source: ImageSource, batch: list[_Cut]) -> list[_Prepared]:
        level = self._level()
        return [self._prepare_one(source, one, level) for one in batch]

    def _level(self) -> int:
        """Return the level of compression of the next chunks."""
        if self._transfer.level is not None:
            return self._transfer.level
        speed, limit = self._link.bytes_per_second, self._transfer.bytes_per_second
        return level_for(min(speed, limit) if speed and limit else speed or limit, THREADS)

    def _is_safe(self, pack: str) -> bool:
        return pack in self._reliable

    def _prepare_one(self, source: ImageSource, one: _Cut, level: int) -> _Prepared:
        if one.hole:
            return _Prepared(one.file, (one.size, b""), None)
        content = source.files[one.file].read(one.offset, one.size)
        if len(content) != one.size:
            raise StoreInvalid(f"{source.files[one.file].name} became shorter while it was read")
        if content == memoryview(ZEROS)[: one.size]:
            return _Prepared(one.file, (one.size, b""), None)
        id = chunk_id(self._target.key, content)
        known = id in self._new or self._target.index.find(id, self._is_safe) is not None
        sealed = None if known else seal(self._target.key, id, content, level=level)
        return _Prepared(one.file, (one.size, id), sealed)


@dataclass(frozen=True)
class _Cut:
    file: int
    offset: int
    size: int
    hole: bool


def _batches(source: ImageSource) -> Iterator[list[_Cut]]:
    batch: list[_Cut] = []
    for number, file in enumerate(source.files):
        for offset, size, hole in file.cuts():
            batch.append(_Cut(number, offset, size, hole))
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


MIB: Final = 1 << 20
USUAL: Final = 3  # of zstd, while nothing is known
# Level: bytes per second of one thread, and what is left of them. Measured with programs and libraries in chunks of
# 2 MiB; memory differs, in about the same proportions. Higher levels cost several times the CPU for a few per cent.
LEVELS: Final = {1: (234 * MIB, 0.385), 3: (171 * MIB, 0.344), 6: (50 * MIB, 0.323)}


def level_for(bytes_per_second: float, threads: int) -> int:
    """Return the level with which an image is sent soonest, by `threads` that compress. 0 is an unknown speed.

    Compressing overlaps with sending, so the slower of the two counts. Never none: room in the store costs, too.
    """
    if not bytes_per_second:
        return USUAL

    def image_bytes_per_second(level: int) -> float:
        speed, left = LEVELS[level]
        return min(speed * threads, bytes_per_second / left)

    return max(LEVELS, key=image_bytes_per_second)


class Link:
    """Counts what is sent, also by requests in parallel. It belongs to one event loop; any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes = self._sending = 0
        self._seconds = self._since = 0.0  # for which at least one request was on its way

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count bytes that are sent in the block."""
        if not self._sending:
            self._since = self._clock()
        self._sending += 1
        try:
            yield
            self._bytes += size
        finally:
            self._sending -= 1
            if not self._sending:
                self._seconds += self._clock() - self._since

    @property
    def bytes_per_second(self) -> float:
        """Return the speed so far, 0 before the first request has ended."""
        seconds = self._seconds + (self._clock() - self._since if self._sending else 0.0)
        return self._bytes / seconds if seconds > 0 else 0.0

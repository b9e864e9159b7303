"""Brings an image back: ranges of packs in parallel, every chunk compared with its name, into a sink.

Chunks are fetched in the order of the recipe's files, so that what a restore needs first is there first. Neighbours in
a pack are one request. A chunk that is in several places of the image is fetched once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kybernate.store import header
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ChunkDamaged, ObjectMissing, StoreInvalid
from kybernate.store.format import pack as packs
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe
from kybernate.store.format.sealing import Sealed, unseal
from kybernate.store.in_thread import in_thread
from kybernate.store.parts import Part, PartBroken, WholePart
from kybernate.store.transfer import Transfer

REQUEST_BYTES = 16 << 20  # of one range; larger ones gain nothing, and hold more memory
GAP_BYTES = 256 << 10  # between two chunks, that are rather read than asked for in two requests


class Sink(Protocol):
    """Where the bytes of an image go; called from several threads, each byte once, in any order."""

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        """Take over bytes of a file, which are not there any more afterwards."""

    def zeros(self, file: str, offset: int, size: int) -> None:
        """Take over that these bytes are zeros."""


FileOffset = tuple[str, int]  # a file, and an offset in it
Has = Callable[[str, int, int], bool]  # file, offset, bytes


def _none(file: str, offset: int, size: int) -> bool:
    return False


@dataclass(frozen=True)
class Wanted:
    """One request: a range of a pack, and the chunks in it with where each belongs."""

    pack: str
    start: int
    length: int
    chunks: tuple[tuple[Place, tuple[FileOffset, ...]], ...]


async def fetch(
    store: ChunkStore, recipe: Recipe, sink: Sink, transfer: Transfer, files: Iterable[str] = (), *, have: Has = _none
) -> None:
    """Write the files of an image, or some of them, into `sink`, but for the pieces that `have` says are there.

    Raises ChunkDamaged where no pack has a whole copy, StoreInvalid where chunks are missing, StoreUnreachable. What
    was written by then is complete chunks.
    """
    wanted = set(files) or {file.name for file in recipe.files}
    targets = _targets(recipe, wanted, have)
    transfer.begins(sum(file.size for file in recipe.files if file.name in wanted))
    known = sum(size for name, offset, size, id in _pieces(recipe, wanted) if id and have(name, offset, size))
    transfer.done(done_bytes=known, known_bytes=known)
    for name, offset, size in _holes(recipe, wanted):
        sink.zeros(name, offset, size)
        transfer.done(done_bytes=size, zero_bytes=size)
    await _know(store, targets)
    await _find_out_ranges(store)
    requests = plan(_places(store, targets), targets, most=lambda: _most(store))  # the first answers may change it
    async with asyncio.TaskGroup() as group:
        slots = asyncio.Semaphore(transfer.parallel)
        for request in requests:
            await slots.acquire()
            task = group.create_task(_serve(store, request, sink, transfer))
            task.add_done_callback(lambda _: slots.release())


async def _know(store: ChunkStore, ids: Iterable[bytes]) -> None:
    """Find out where chunks are: from the indexes, and from the packs themselves where no index has all."""
    await store.refresh()
    if any(store.index.find(id) is None for id in ids):
        await store.complete(await store.packs())


async def _find_out_ranges(store: ChunkStore) -> None:
    """Find out by a small object whether parts can be asked for: else the first requests would each bring a pack."""
    if store.objects.ranged:
        with suppress(ObjectMissing):
            await store.objects.get_range(header.NAME, 0, 1)


def _most(store: ChunkStore) -> int:
    """Return how many bytes one request may be for."""
    return REQUEST_BYTES if store.objects.ranged else 2 * packs.PACK_BYTES


def plan(
    places: Iterable[tuple[str, Place]],
    targets: Mapping[bytes, Sequence[FileOffset]],
    *,
    most: Callable[[], int] = lambda: REQUEST_BYTES,
) -> Iterator[Wanted]:
    """Yield the requests for chunks in the given order, neighbours joined up to `most()` bytes."""
    pack, start, end, chunks = "", 0, 0, list[tuple[Place, tuple[FileOffset, ...]]]()
    for name, place in places:
        near = name == pack and end <= place.offset <= end + GAP_BYTES
        if chunks and (not near or place.offset + place.stored - start > most()):
            yield Wanted(pack, start, end - start, tuple(chunks))
            chunks = []
        if not chunks:
            pack, start = name, place.offset
        end = place.offset + place.stored
        chunks.append((place, tuple(targets[place.id])))
    if chunks:
        yield Wanted(pack, start, end - start, tuple(chunks))


async def _serve(store: ChunkStore, request: Wanted, sink: Sink, transfer: Transfer) -> None:
    delivery = _Delivery(store, request, sink)
    try:
        await _read(store, delivery, transfer)
    finally:
        transfer.done(sent_bytes=delivery.taken)
    for one in delivery.damaged:
        await _serve_damaged(store, request.pack, one, sink, transfer)
    came = request.chunks[: delivery.done]
    transfer.done(done_bytes=sum(place.size * len(targets) for place, targets in came), chunks=len(came))
    if delivery.done < len(request.chunks):
        await _serve_moved(store, delivery.rest, sink, transfer)


async def _read(store: ChunkStore, delivery: _Delivery, transfer: Transfer) -> None:
    """Read the chunks of a request; not all come where their pack is gone."""
    wanted, name = delivery.rest, packs.object_name(delivery.rest.pack)
    await transfer.pace(wanted.length)
    try:
        await store.objects.read_range(name, wanted.start, wanted.length, delivery.take)
    except PartBroken:  # `get_range` tries for longer, and names what is wrong
        if (content := await _content(store, delivery.rest, transfer)) is not None:
            await in_thread(delivery.take, WholePart(content))
    except ObjectMissing:
        pass


async def _content(store: ChunkStore, request: Wanted, transfer: Transfer) -> bytes | memoryview | None:
    """Return the bytes of a request; None where its pack is gone."""
    await transfer.pace(request.length)
    try:
        return await store.objects.get_range(packs.object_name(request.pack), request.start, request.length)
    except ObjectMissing:
        return None


async def _serve_damaged(
    store: ChunkStore, pack: str, chunk: tuple[Place, tuple[FileOffset, ...]], sink: Sink, transfer: Transfer
) -> None:
    """Serve a chunk that was damaged in `pack`, or on the way, by another copy. Raises ChunkDamaged for all of them."""
    place, targets = chunk
    tried: list[str] = []
    copy: tuple[str, Place] | None = pack, place  # once more, for what was damaged on the way
    while copy is not None:
        pack, place = copy
        again = Wanted(pack, place.offset, place.stored, ((place, targets),))
        content = await _content(store, again, transfer)
        if content is not None and await _is_whole(store, again, content, sink):
            return
        tried.append(pack)
        copy = store.index.find(place.id, lambda other: other not in tried)
    raise ChunkDamaged(f"chunk {place.id.hex()} is damaged in all packs that have it: {', '.join(tried)}")


async def _is_whole(store: ChunkStore, request: Wanted, content: bytes | memoryview, sink: Sink) -> bool:
    """Write the one chunk of a request, and return True; False where it is damaged."""
    delivery = _Delivery(store, request, sink)
    await in_thread(delivery.take, WholePart(content))
    return not delivery.damaged


async def _serve_moved(store: ChunkStore, request: Wanted, sink: Sink, transfer: Transfer) -> None:
    """Serve the chunks of a pack that a collection has removed since, from the packs that hold them now."""
    await store.reload()
    await _know(store, (place.id for place, _ in request.chunks))
    targets = {place.id: targets for place, targets in request.chunks}
    found = list(_places(store, targets, without=(request.pack,)))
    for again in plan(found, targets, most=lambda: _most(store)):
        await _serve(store, again, sink, transfer)


class _Delivery:
    """The chunks of a request on their way into a sink: `done` of them have come, of which some were `damaged`."""

    def __init__(self, store: ChunkStore, request: Wanted, sink: Sink) -> None:
        self._store, self._request, self._sink = store, request, sink
        self.done = self.taken = 0  # chunks; bytes
        self.damaged: list[tuple[Place, tuple[FileOffset, ...]]] = []

    @property
    def rest(self) -> Wanted:
        """The request for what has not come yet."""
        chunks = self._request.chunks[self.done :]
        start, end = chunks[0][0].offset, self._request.start + self._request.length
        return Wanted(self._request.pack, start, end - start, chunks)

    def take(self, part: Part) -> None:
        """Write chunks as they come, from the first of the rest on. Raises PartBroken; what came by then counts."""
        rest = self.rest
        at = rest.start
        for place, targets in rest.chunks:
            between = len(part.take(place.offset - at))
            stored = part.take(place.stored)
            self.taken += between + len(stored)
            at = place.offset + place.stored
            try:
                opened = unseal(self._store.key, Sealed(place.id, place.codec, place.size, stored))
            except ChunkDamaged:
                self.damaged.append((place, targets))
            else:
                for file, offset in targets:
                    self._sink.write(file, offset, opened)
            self.done += 1


def _targets(recipe: Recipe, wanted: set[str], have: Has) -> dict[bytes, list[FileOffset]]:
    """Return where each chunk belongs, in the order in which they are needed first."""
    targets: dict[bytes, list[FileOffset]] = {}
    for name, offset, size, id in _pieces(recipe, wanted):
        if id and not have(name, offset, size):
            targets.setdefault(id, []).append((name, offset))
    return targets


def _holes(recipe: Recipe, wanted: set[str]) -> Iterator[tuple[str, int, int]]:
    return ((name, offset, size) for name, offset, size, id in _pieces(recipe, wanted) if not id)


def _pieces(recipe: Recipe, wanted: set[str]) -> Iterator[tuple[str, int, int, bytes]]:
    for file in recipe.files:
        offset = 0
        for size, id in file.pieces if file.name in wanted else ():
            yield file.name, offset, size, id
            offset += size


def _places(store: ChunkStore, ids: Iterable[bytes], *, without: Sequence[str] = ()) -> Iterator[tuple[str, Place]]:
    for id in ids:
        found = store.index.find(id, lambda pack: pack not in without)
        if found is None:
            gone = f", and pack {without[0]} is missing" if without else ""
            raise StoreInvalid(
                f"chunk {id.hex()} is in no pack{gone}", advice="`kybernate store check` lists what is damaged"
            )
        yield found

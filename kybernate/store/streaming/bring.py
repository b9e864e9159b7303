"""Brings an image to a directory in which its restore may begin before all of it is there.

What fails here fails the restore: the record says why, and the processes are killed before they have run. A process
that is killed here releases its lock of the record, which the restore sees.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format.recipe import Recipe
from kybernate.store.in_thread import in_thread
from kybernate.store.order import late_files, ordered
from kybernate.store.reader import Sink, fetch
from kybernate.store.streaming.sink import ArrivingSink
from kybernate.store.tiers.directory import require_whole
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import Manifest, ManifestInvalid, decode
from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.vram_io import digest
from kybernate_shim.vram_io.arrival import BLOCK, Description
from kybernate_shim.vram_io.image_files import ARRIVAL

PATIENCE = 120.0  # seconds without a byte: longer than a request to the store takes with its retries


IMAGE_NOT_ARRIVED_ADVICE: Final = "`kybernate store check` examines the store"


Continues = Callable[[int], object]  # gets the number of the origin that continues in the place of another


@dataclass(frozen=True)
class Coming:
    """An image that is elsewhere: `origins` are the tiers and places that it may come from, as a restore names them.

    `data` are the bytes of each file that are no hole, as far as known. `pour` gives a sink all bytes, those of CRIU's
    files first, from the first of the origins and those that continue.
    """

    name: str
    manifest: bytes
    data: Mapping[str, int]
    origins: Sequence[str]
    pour: Callable[[Sink, Transfer, Continues], Awaitable[None]]


def of_recipe(store: ChunkStore, recipe: Recipe, origin: str) -> Coming:
    """Return an image of an open store."""
    data = {file.name: sum(size for size, id in file.pieces if id) for file in recipe.files}
    return Coming(
        recipe.name,
        recipe.manifest,
        data,
        [origin],
        lambda sink, transfer, continues: fetch(store, ordered(recipe), sink, transfer),
    )


async def bring(
    coming: Coming, directory: Path, transfer: Transfer, *, transient: bool, ready: Callable[[], object]
) -> None:
    """Bring an image to a directory, which is made; call `ready`, from any thread, when its restore may begin.

    A `transient` one is for one restore, and its caller's to remove. Any other one is an image like any other when this
    returns. Raises FileExistsError, Failure, ImageDamaged and what `pour` raises; no directory is left then.
    """
    with _sink(coming, directory, ready, transient=transient) as sink:
        try:
            await coming.pour(sink, transfer, sink.record.comes_from)
        except BaseException as error:  # noqa: BLE001  # raised again
            first = first_of(error)
            sink.record.fail(str(first) or "the transfer was ended")
            raise first from None
        sink.record.complete()
        if not transient:
            # A restore has compared what it read; an image that stays is compared as any other one that arrives is.
            await in_thread(require_whole, directory, decode(coming.manifest))
            await in_thread(sink.keep, durable=True)
            (directory / ARRIVAL).unlink()


@asynccontextmanager
async def arriving(
    coming: Coming, directory: Path, transfer: Transfer, *, transient: bool
) -> AsyncIterator[asyncio.Task[None]]:
    """Bring an image, and yield when its restore may begin: the task brings the rest, and ends with the block.

    A restore that fails in the block because the transfer has failed raises the transfer's error. Raises as `bring`.
    """
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    work = bring(coming, directory, transfer, transient=transient, ready=lambda: loop.call_soon_threadsafe(begun.set))
    task, waiting = asyncio.create_task(work), asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.is_set():
            await task
        yield task
    except Failure as error:
        await _end(task, waiting)
        if (cause := _cause(task, error)) is error:
            raise
        raise cause from error
    finally:
        await _end(task, waiting)


async def _end(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _cause(task: asyncio.Task[None], error: Failure) -> BaseException:
    """Return why a restore has failed: it finds its image gone where the transfer had failed before."""
    failure = None if task.cancelled() else task.exception()
    return failure if isinstance(failure, Failure | OSError) else error


def first_of(error: BaseException) -> BaseException:
    """Return the first of several errors of requests that ran in parallel."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _sink(coming: Coming, directory: Path, ready: Callable[[], object], *, transient: bool) -> Iterator[ArrivingSink]:
    manifest = _decoded(coming)
    sizes = {file.name: file.size for file in manifest.stored_files}
    awaited = _awaited(manifest, sizes)
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    make_directory(directory)
    with ExitStack() as stack:
        failed = stack.enter_context(ExitStack())
        failed.callback(shutil.rmtree, directory, ignore_errors=True)
        _require_room(directory, {**sizes, **coming.data}, given_back=awaited if transient else {})
        description = Description(awaited, coming.origins, PATIENCE, transient)
        sink = ArrivingSink(directory, sizes, coming.manifest, description, ready, _digests(manifest))
        stack.callback(sink.close)
        yield sink
        failed.pop_all()


def _decoded(coming: Coming) -> Manifest:
    try:
        return decode(coming.manifest)
    except (ManifestInvalid, RecursionError) as error:
        raise Failure(
            f"image {coming.name} of {coming.origins[0]}: {error}", advice=IMAGE_NOT_ARRIVED_ADVICE
        ) from error


def _awaited(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the files that a restore does not begin with, in the order of its need."""
    return {name: sizes[name] for name in late_files(manifest) if name in sizes}


def _digests(manifest: Manifest) -> dict[str, str]:
    """Return the kinds of digest of the files that a restore compares block by block, where they lie.

    Encrypted ones are compared when they are decrypted, and those of the arena when their bytes are in it.
    """
    if manifest.encryption is not None:
        return {}
    return {one.file: kind for one in manifest.vram if (kind := digest.kind_of_blocks(one.digest, BLOCK))}


def _require_room(directory: Path, data: Mapping[str, int], *, given_back: Mapping[str, int]) -> None:
    """Raise Failure where the files have no room; those that are given back as they are read may fit."""
    needed = sum(size for name, size in data.items() if name not in given_back)
    try:
        require_space(directory, needed, what="image")
    except NoRoom as error:
        raise Failure(str(error), advice=IMAGE_NOT_ARRIVED_ADVICE) from error

"""Brings an image from a store in a thread of its own, while its restore runs.

What fails here fails the restore: the record says why, and the processes are killed before they have run. A process
that is killed here releases its lock of the record, which the restore sees.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format.recipe import Recipe
from kybernate.store.in_thread import in_thread
from kybernate.store.place import StorePlace, open_store
from kybernate.store.reader import fetch
from kybernate.store.streaming.sink import ArrivingSink
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import Manifest, ManifestInvalid, decode
from kybernate_shim.checkpoint.image.plaintext_memory import private_memory
from kybernate_shim.checkpoint.image.store import TierFull, require_space
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import ARRIVING
from kybernate_shim.vram_io.arrival import Description
from kybernate_shim.vram_io.image_files import ARRIVAL, VramFile

PATIENCE = 120.0  # seconds without a byte: longer than a request to the store takes with its retries
MEMORY = "image"  # begins the name of the memory that an image arrives in

Find = Callable[[ChunkStore], Awaitable[Recipe]]


class ImageNotArrived(Failure):
    """The part of an image that a restore begins with could not be brought from the store."""

    advice = "`kybernate store check` examines the store"


@dataclass(frozen=True)
class Arriving:
    """An image whose restore may begin. `wait` returns when all of it is there, or raises what has failed."""

    directory: Path
    recipe: Recipe
    wait: Callable[[], None]


@contextmanager
def arriving_in_memory(place: StorePlace, find: Find, transfer: Transfer) -> Iterator[Arriving]:
    """Bring an image into memory for one restore, which runs in the block. Nothing is left afterwards, nor written.

    Raises ImageNotArrived, what `find` raises, and the errors of the store.
    """
    with private_memory(ARRIVING, MEMORY, may_be_swapped=True) as memory:
        where = _Where(lambda recipe: memory / recipe.name, transient=True)
        with _bringing(place, find, transfer, where) as arriving:
            yield arriving


@contextmanager
def arriving_at(
    place: StorePlace, find: Find, transfer: Transfer, target: Callable[[Recipe], Path]
) -> Iterator[Arriving]:
    """Bring an image to the directory `target`, where restores may begin before it is whole.

    It stays if the block calls `wait` to its end, and is removed else. Raises FileExistsError, and as
    `arriving_in_memory`.
    """
    with _bringing(place, find, transfer, _Where(target, transient=False)) as arriving:
        yield arriving


@dataclass(frozen=True)
class _Where:
    directory: Callable[[Recipe], Path]
    transient: bool


@contextmanager
def _bringing(place: StorePlace, find: Find, transfer: Transfer, where: _Where) -> Iterator[Arriving]:
    bringing = _Bringing(place, find, transfer, where)
    bringing.start()
    try:
        yield bringing.begun()
    except Failure as error:
        bringing.stop()
        raise bringing.cause_of(error) from error
    finally:
        bringing.stop()


class _Bringing:
    """A thread with an event loop, in which an image is brought."""

    def __init__(self, place: StorePlace, find: Find, transfer: Transfer, where: _Where) -> None:
        self._place, self._find, self._transfer, self._where = place, find, transfer, where
        self._progress = threading.Event()  # the restore may begin, or this has ended
        self._failure: BaseException | None = None
        self._arriving: Arriving | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._bring())
        self._thread = threading.Thread(target=self._run, name="arrival")

    def start(self) -> None:
        self._thread.start()

    def begun(self) -> Arriving:
        """Wait until the restore may begin."""
        self._progress.wait()
        if self._arriving is None or self._failure is not None:
            self.wait()
        assert self._arriving is not None
        return self._arriving

    def wait(self) -> None:
        """Wait for the end. Raises what has failed."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def cause_of(self, error: Failure) -> Exception:
        """Return why a restore has failed: it finds its image gone where the transfer had failed before."""
        return self._failure if isinstance(self._failure, Failure | OSError) else error

    def stop(self) -> None:
        """End it, whole or not."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except BaseExceptionGroup as group:  # of several requests that ran in parallel; the first error counts
            self._failure = group.exceptions[0]
        except BaseException as error:  # noqa: BLE001  # raised again by wait()
            self._failure = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._progress.set()

    async def _bring(self) -> None:
        store = await open_store(self._place).open()
        try:
            recipe = await self._find(store)
            with self._sink(recipe) as (directory, sink):
                await self._fetch(store, recipe, directory, sink)
        finally:
            store.close()

    async def _fetch(self, store: ChunkStore, recipe: Recipe, directory: Path, sink: ArrivingSink) -> None:
        try:
            await fetch(store, recipe, sink, self._transfer)
        except BaseException as error:
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            sink.record.fail(str(first) or "the transfer was ended")
            raise
        sink.record.complete()
        if not self._where.transient:
            await in_thread(sink.keep, durable=True)
            (directory / ARRIVAL).unlink()

    @contextmanager
    def _sink(self, recipe: Recipe) -> Iterator[tuple[Path, ArrivingSink]]:
        manifest, directory = _manifest(recipe), self._where.directory(recipe)
        ordered, awaited = _ordered(recipe, manifest)
        if directory.exists():
            raise FileExistsError(f"{directory} exists")
        make_directory(directory)
        with ExitStack() as stack:
            failed = stack.enter_context(ExitStack())
            failed.callback(shutil.rmtree, directory, ignore_errors=True)
            _require_room(directory, recipe, awaited if self._where.transient else {})
            description = Description(
                awaited, f"{tier_of(self._place)} {self._place.url}", PATIENCE, self._where.transient
            )

            def ready() -> None:
                self._arriving = Arriving(directory, recipe, self.wait)
                self._progress.set()

            sink = ArrivingSink(directory, ordered, description, ready)
            stack.callback(sink.close)
            yield directory, sink
            failed.pop_all()


def tier_of(place: StorePlace) -> str:
    """Return the tier that a store is: `disk` for a directory, else `object`."""
    return "disk" if place.url.startswith("file:") else "object"


def _manifest(recipe: Recipe) -> Manifest:
    try:
        return decode(recipe.manifest)
    except ManifestInvalid as error:
        raise ImageNotArrived(f"image {recipe.name} in the store: {error}") from error


def _ordered(recipe: Recipe, manifest: Manifest) -> tuple[Recipe, dict[str, int]]:
    """Return the recipe in the order of a restore's need, and the sizes of the files that it does not begin with.

    CRIU's files come first, then the arena's, which are read while CRIU works, then those that wait for CRIU.
    """
    suffix = ".enc" if manifest.encryption else ""
    moved = [f"{file.file}{suffix}" for file in sorted(manifest.moved_files, key=lambda one: isinstance(one, VramFile))]
    files = {file.name: file for file in recipe.files}
    later = [files[name] for name in moved if name in files]
    first = [file for file in recipe.files if file not in later]
    return replace(recipe, files=(*first, *later)), {file.name: file.size for file in later}


def _require_room(directory: Path, recipe: Recipe, given_back: Mapping[str, int]) -> None:
    """Raise ImageNotArrived where the files have no room; those that are given back as they are read may fit."""
    needed = sum(size for file in recipe.files if file.name not in given_back for size, id in file.pieces if id)
    try:
        require_space(directory, needed, what="image")
    except TierFull as error:
        raise ImageNotArrived(str(error)) from error

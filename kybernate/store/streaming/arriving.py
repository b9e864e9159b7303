"""Brings an image from a store in a thread of its own, while its restore runs: for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format.recipe import Recipe
from kybernate.store.place import StorePlace, open_store
from kybernate.store.streaming.bring import bring, first_of, of_recipe
from kybernate.store.streaming.memory import memory_for
from kybernate.store.transfer import Transfer

Find = Callable[[ChunkStore], Awaitable[Recipe]]


@dataclass(frozen=True)
class Arriving:
    """An image whose restore may begin. `wait` returns when all of it is there, or raises what has failed."""

    directory: Path
    recipe: Recipe
    wait: Callable[[], None]


@contextmanager
def arriving_in_memory(place: StorePlace, find: Find, transfer: Transfer) -> Iterator[Arriving]:
    """Bring an image into memory for one restore, which runs in the block. Nothing is left afterwards, nor written.

    Raises Failure, what `find` raises, and the errors of the store.
    """
    with memory_for() as memory:
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
        if (cause := bringing.cause_of(error)) is error:
            raise
        raise cause from error
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
        except BaseException as error:  # noqa: BLE001  # raised again by wait()
            self._failure = first_of(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._progress.set()

    async def _bring(self) -> None:
        store = await open_store(self._place).open()
        try:
            recipe = await self._find(store)
            directory = self._where.directory(recipe)

            def ready() -> None:
                self._arriving = Arriving(directory, recipe, self.wait)
                self._progress.set()

            coming = of_recipe(store, recipe, f"{tier_of(self._place)} {self._place.url}")
            await bring(coming, directory, self._transfer, transient=self._where.transient, ready=ready)
        finally:
            store.close()


def tier_of(place: StorePlace) -> str:
    """Return the tier that a store is: `disk` for a directory, else `object`."""
    return "disk" if place.url.startswith("file:") else "object"

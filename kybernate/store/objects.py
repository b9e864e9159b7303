"""Objects by name: the little that a chunk store needs of S3, GCS, Azure or a directory.

Names are relative to the store's prefix. Errors are facts, whichever service it is. Times are the service's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kybernate.store.errors import ObjectMissing, StoreDenied, StoreFull, StoreUnreachable
from kybernate.store.parts import Part, WholeParts
from kybernate.store.signed import NotAnswered, SignedRanges

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
LIST_PAGE = 1000
NO_RANGES = "non-partial response"  # obstore's words
FULL = ("No space left", "QuotaExceeded", "InsufficientStorage", "507 ")  # in the words of services and of Linux


@dataclass(frozen=True)
class Stored:
    """An object that is there: its name, its bytes, and when it was written, in the service's seconds since 1970."""

    name: str
    size: int
    modified: float


class Objects(Protocol):
    """A flat space of objects. All calls raise the errors of `errors.py`."""

    ranged: bool  # whether a part of an object costs less than all of it

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Write an object, whole or not at all; one that is there is replaced."""

    async def get(self, name: str) -> bytes:
        """Return an object. Raises ObjectMissing."""

    async def get_range(self, name: str, start: int, length: int) -> bytes | memoryview:
        """Return a part of an object, shorter where the object ends; it is not copied. Raises ObjectMissing."""

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        """Return what `work` returns, in a thread, of a part that it takes. Raises ObjectMissing and PartBroken.

        A cancelled caller waits until `work` has ended.
        """

    async def head(self, name: str) -> Stored:
        """Return what is known of an object. Raises ObjectMissing."""

    def list(self, prefix: str) -> AsyncIterator[Stored]:
        """Yield the objects whose names begin with `prefix` and a slash."""

    async def copy(self, source: str, target: str) -> None:
        """Have the service copy an object, which it reads at one moment. Raises ObjectMissing."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are fine."""


class RemoteObjects(WholeParts):
    """Objects in what obstore reaches: S3, GCS, Azure, a local directory, memory.

    Where a service answers a request for a part as if it were one for all (rclone's S3 server does: status 200 in place
    of 206), parts are read by signed URLs. `ranged` becomes false where that fails as well: whole objects are read.
    """

    def __init__(self, store: ObjectStore, prefix: str = "", *, title: str = "") -> None:
        self._store = store
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._signed = SignedRanges(store)
        self._signs = False
        self.title = title or str(store)
        self.ranged = True

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        import obstore

        with self._translated(name):
            # One request: packs are small enough, and parts would cost two requests more.
            await obstore.put_async(self._store, self._prefix + name, content, use_multipart=False)

    async def get(self, name: str) -> bytes:
        import obstore

        with self._translated(name):
            answer = await obstore.get_async(self._store, self._prefix + name)
            return (await answer.bytes_async()).to_bytes()

    async def get_range(self, name: str, start: int, length: int) -> memoryview:
        import obstore
        from obstore.exceptions import GenericError

        if self.ranged and not self._signs:
            with self._translated(name):
                try:
                    part = await obstore.get_range_async(self._store, self._prefix + name, start=start, length=length)
                    return memoryview(part)
                except GenericError as error:
                    if NO_RANGES not in str(error):
                        raise
            self._signs = True
        if self.ranged:
            view = await self._signed.get(self._prefix + name, start, length)
            if view is not None:
                return view
            await self.head(name)  # what is missing, refused or away is named here
            self.ranged = False
        with self._translated(name):
            answer = await obstore.get_async(self._store, self._prefix + name)
            return memoryview(await answer.bytes_async())[start : start + length]

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        if self.ranged and self._signs:
            with suppress(NotAnswered):
                return await self._signed.read(self._prefix + name, start, length, work)
        return await super().read_range(name, start, length, work)

    async def head(self, name: str) -> Stored:
        import obstore

        with self._translated(name):
            return self._stored(await obstore.head_async(self._store, self._prefix + name))

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        import obstore

        with self._translated(prefix):
            async for page in obstore.list(self._store, self._prefix + prefix, chunk_size=LIST_PAGE):
                for meta in page:
                    yield self._stored(meta)

    async def copy(self, source: str, target: str) -> None:
        import obstore

        with self._translated(source):
            await obstore.copy_async(self._store, self._prefix + source, self._prefix + target)

    async def delete(self, names: Sequence[str]) -> None:
        import obstore

        for begin in range(0, len(names), LIST_PAGE):
            with self._translated("delete"):
                paths = [self._prefix + name for name in names[begin : begin + LIST_PAGE]]
                try:
                    await obstore.delete_async(self._store, paths)
                except FileNotFoundError:
                    await self._delete_each(paths)

    async def _delete_each(self, paths: Sequence[str]) -> None:
        """Delete one by one: where one object of a request is missing, some services leave the others."""
        import obstore

        for path in paths:
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                continue

    def _stored(self, meta: Any) -> Stored:
        return Stored(str(meta["path"]).removeprefix(self._prefix), meta["size"], meta["last_modified"].timestamp())

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        from obstore import exceptions

        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise ObjectMissing(f"{self.title}: there is no object {name}") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            if _is_full(error):  # services answer QuotaExceeded with 403
                raise StoreFull(f"{self.title}: no room for {name}: {_short(error)}") from error
            raise StoreDenied(f"{self.title}: {name}: {_short(error)}") from error
        except (exceptions.BaseError, OSError) as error:
            if _is_full(error):
                raise StoreFull(f"{self.title}: no room for {name}: {_short(error)}") from error
            raise StoreUnreachable(f"{self.title}: {name}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """Return the first line: obstore appends a dump of its error's structure."""
    return str(error).partition("\n")[0]


def _is_full(error: Exception) -> bool:
    words = str(error)
    return any(mark in words for mark in FULL)

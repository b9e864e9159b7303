"""Objects by name: the little that a chunk store needs of S3, GCS, Azure or a directory.

Names are relative to the store's prefix. Errors are facts, whichever service it is. Times are the service's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kybernate.store.answers import failure_of, refuses_bulk, refuses_condition
from kybernate.store.errors import StoreInconsistent, StoreInvalid
from kybernate.store.listing import PAGE_SECONDS, whole_list
from kybernate.store.parts import Part, WholeParts
from kybernate.store.signed import NotAnswered, SignedRanges

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
DELETE_PAGE = 1000
LIST_PAGE = 50  # of what a service lists: a list that repeats itself is found after so many requests at most
MOST_BYTES = 256 << 20  # of an object that is read whole: a larger one is none of ours
RETAINED = "x-amz-object-lock-retain-until-date"
NO_RANGES = "non-partial response"  # obstore's words


@dataclass(frozen=True)
class Stored:
    """An object that is there: its name, its bytes, and when it was written, in the service's seconds since 1970.

    `version` is the service's name of this content of it, empty in lists and where the bucket keeps no others.
    """

    name: str
    size: int
    modified: float
    version: str = ""


class Objects(Protocol):
    """A flat space of objects. All calls raise the errors of `errors.py`."""

    ranged: bool  # whether a part of an object costs less than all of it
    lacks: set[str]  # what the service was found not to have, a sentence each

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Write an object, whole or not at all; one that is there is replaced."""

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless it is there; return whether it was written.

        A service that knows no conditions replaces it.
        """

    async def get(self, name: str, *, most: int = MOST_BYTES) -> bytes:
        """Return an object. Raises ObjectMissing, and StoreInvalid before it reads one of more than `most` bytes."""

    async def get_range(self, name: str, start: int, length: int) -> bytes | memoryview:
        """Return a part of an object, shorter where the object ends; it is not copied. Raises ObjectMissing."""

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        """Return what `work` returns, in a thread, of a part that it takes. Raises ObjectMissing and PartBroken.

        A cancelled caller waits until `work` has ended.
        """

    async def head(self, name: str) -> Stored:
        """Return what is known of an object. Raises ObjectMissing."""

    async def locked_until(self, name: str) -> float | None:
        """Return until when the service keeps this content whatever is deleted, None where it says nothing of that."""

    def list(self, prefix: str) -> AsyncIterator[Stored]:
        """Yield the objects whose names begin with `prefix` and a slash.

        An object that is there from the begin to the end is among them; raises StoreInconsistent where that is unsure.
        """

    async def folders(self, prefix: str) -> Sequence[str]:
        """Return the names of the next level below `prefix` that have objects below them."""

    async def copy(self, source: str, target: str) -> None:
        """Have the service copy an object, which it reads at one moment. Raises ObjectMissing."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are fine."""


class RemoteObjects(WholeParts):
    """Objects in what obstore reaches: S3, GCS, Azure, a local directory, memory.

    Where a service answers a request for a part as if it were one for all (rclone's S3 server does: status 200 in place
    of 206), parts are read by signed URLs. `ranged` becomes false where that fails as well: whole objects are read.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        title: str = "",
        singly: Callable[[], ObjectStore] | None = None,
        ca: bytes | None = None,
        ordered: bool = True,
    ) -> None:
        """`singly` opens the store so that each deletion is a request; `ca` are CAs besides the system's.

        `ordered` says that lists come in order: of all services, but not of a directory.
        """
        self._store = store
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._signed = SignedRanges(store, ca)
        self._signs = False
        self._singly = singly
        self._ordered = ordered
        self._conditions = True  # until the service has refused one
        self.title = title or str(store)
        self.ranged = True
        self.lacks: set[str] = set()

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        import obstore

        with self._translated(name):
            # One request: packs are small enough, and parts would cost two requests more.
            await obstore.put_async(self._store, self._prefix + name, content, use_multipart=False)

    async def create(self, name: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError, PreconditionError

        with self._translated(name):
            if self._conditions:
                try:
                    await obstore.put_async(self._store, self._prefix + name, content, mode="create")
                    return True
                except (AlreadyExistsError, PreconditionError):
                    return False
                except (GenericError, NotSupportedError, NotImplementedError) as error:
                    if not refuses_condition(error):
                        raise
                self._conditions = False
            await obstore.put_async(self._store, self._prefix + name, content, use_multipart=False)
        return True

    async def get(self, name: str, *, most: int = MOST_BYTES) -> bytes:
        content: bytes = (await self._read(name, most)).to_bytes()
        return content

    async def _read(self, name: str, most: int) -> Any:
        import obstore

        with self._translated(name):
            answer = await obstore.get_async(self._store, self._prefix + name)
            if answer.meta["size"] > most:
                raise StoreInvalid(f"{name} has {answer.meta['size']} bytes; at most {most} are read")
            return await answer.bytes_async()

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
        return memoryview(await self._read(name, MOST_BYTES))[start : start + length]

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        if self.ranged and self._signs:
            with suppress(NotAnswered):
                return await self._signed.read(self._prefix + name, start, length, work)
        return await super().read_range(name, start, length, work)

    async def head(self, name: str) -> Stored:
        import obstore

        with self._translated(name):
            meta = await obstore.head_async(self._store, self._prefix + name)
            return replace(self._stored(meta), version=_version(meta["version"]))

    async def locked_until(self, name: str) -> float | None:
        """Look at what S3 says of a lock with each object: the client library has no call for the bucket's."""
        from obstore.store import S3Store

        if not isinstance(self._store, S3Store):
            return None
        headers = await self._signed.headers(self._prefix + name)
        with suppress(ValueError):
            return datetime.fromisoformat(headers.get(RETAINED, "")).timestamp()
        return None

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        for one in await whole_list(self._pages, prefix, ordered=self._ordered):
            yield one

    async def _pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        import obstore

        place, offset = self._prefix + prefix, self._prefix + after if after else None
        with self._translated(prefix):
            async for page in obstore.list(self._store, place, offset=offset, chunk_size=LIST_PAGE):
                yield [self._stored(meta) for meta in page]

    async def folders(self, prefix: str) -> Sequence[str]:
        import obstore

        with self._translated(prefix):
            async with asyncio.timeout(PAGE_SECONDS):
                found = await obstore.list_with_delimiter_async(self._store, self._prefix + prefix)
        return [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    async def copy(self, source: str, target: str) -> None:
        import obstore

        with self._translated(source):
            await obstore.copy_async(self._store, self._prefix + source, self._prefix + target)

    async def delete(self, names: Sequence[str]) -> None:
        from obstore.exceptions import BaseError

        for begin in range(0, len(names), DELETE_PAGE):
            paths = [self._prefix + name for name in names[begin : begin + DELETE_PAGE]]
            with self._translated("delete"):
                try:
                    await self._delete(paths)
                except BaseError as error:
                    if self._singly is None or not refuses_bulk(error):
                        raise
                    self._store, self._singly = self._singly(), None
                    self.lacks.add("it deletes one object per request: collections take longer")
                    await self._delete(paths)

    async def _delete(self, paths: Sequence[str]) -> None:
        import obstore

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
        from obstore.exceptions import BaseError

        try:
            yield
        except TimeoutError as error:  # an OSError, but none of the service's words
            raise StoreInconsistent(f"{self.title}: the list of {name} does not end") from error
        except (BaseError, OSError) as error:
            raise failure_of(self.title, name, error) from error


def _version(name: str | None) -> str:
    """Return the name of a version; a bucket that keeps none may call its only one `null`."""
    return "" if name in (None, "null") else str(name)

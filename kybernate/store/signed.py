"""Parts of objects from services that answer them with status 200 in place of 206, as rclone's S3 server does.

The client library refuses such an answer, although it has the right header and content. Whole objects in place of parts
are slow there: the server computes a digest of each. So the part is asked for by a signed URL.
"""

from __future__ import annotations

import asyncio
import http.client
import mmap
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from kybernate.store.in_thread import hurried
from kybernate.store.parts import Part, PartBroken

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
VALID = timedelta(minutes=5)
CONNECT_SECONDS = 10.0
TIMEOUT_SECONDS = 60.0
BUFFER_BYTES = 2 << 20  # of a thread: chunks are not larger, so it seldom grows


class NotAnswered(Exception):
    """The service, or the way to it, needs more than this can."""


class SignedRanges:
    """Reads parts; each thread has a connection of its own, which is kept, and the memory for one chunk."""

    def __init__(self, store: ObjectStore, ca: bytes | None = None) -> None:
        self._store = store
        self._ca = ca
        self._threads = threading.local()

    async def get(self, path: str, start: int, length: int) -> memoryview | None:
        """Return a part of an object; None where the service or the way to it needs more than this can."""

        def whole(part: Part) -> memoryview:
            return memoryview(bytes(part.take(length)))

        try:
            return await self.read(path, start, length, whole)
        except (NotAnswered, PartBroken):
            return None  # the whole object will be asked for, which names what is wrong

    async def read(self, path: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        """Return what `work` returns, in a thread, of a part that it takes.

        Raises NotAnswered before `work` is called, and PartBroken out of it. A cancelled caller waits until it has
        ended.
        """
        import obstore
        from obstore.exceptions import BaseError

        try:
            url = await obstore.sign_async(self._store, "GET", path, VALID)  # type: ignore[call-overload]
        except (BaseError, OSError, ValueError, TypeError) as error:
            raise NotAnswered from error
        cancelled = _Cancelled()
        return await hurried(cancelled.cancel, self._read, url, start, length, work, cancelled)

    async def headers(self, path: str) -> Mapping[str, str]:
        """Return the headers of an object, with small letters; none where the service or the way to it needs more."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            url = await obstore.sign_async(self._store, "HEAD", path, VALID)  # type: ignore[call-overload]
            return await asyncio.to_thread(self._headers, url)
        except (BaseError, OSError, ValueError, TypeError, http.client.HTTPException):
            return {}

    def _headers(self, url: str) -> Mapping[str, str]:
        parts = urlsplit(url)
        connection = self._new_connection(parts.scheme, parts.netloc)
        try:
            _connect(connection)
            connection.request("HEAD", f"{parts.path}?{parts.query}")
            answer = connection.getresponse()
            return {name.lower(): value for name, value in answer.getheaders()} if answer.status == 200 else {}
        finally:
            connection.close()

    def _read(self, url: str, start: int, length: int, work: Callable[[Part], T], cancelled: _Cancelled) -> T:
        parts = urlsplit(url)
        connection, kept = self._connection(parts.scheme, parts.netloc)
        complete = False
        try:
            part = self._part(connection, f"{parts.path}?{parts.query}", start, length, cancelled, kept=kept)
            result = work(part)
            complete = part.finish()
        finally:
            cancelled.ends(None)
            if not complete:
                connection.close()  # with the rest of an answer that is not needed
        return result

    def _part(
        self,
        connection: http.client.HTTPConnection,
        target: str,
        start: int,
        length: int,
        cancelled: _Cancelled,
        *,
        kept: bool,
    ) -> _SignedPart:
        try:
            answer = _ask(connection, target, start, length, cancelled, again=kept)
            size = min(length, int(answer.getheader("Content-Length", "")))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotAnswered from error
        return _SignedPart(answer, size, self._memory())

    def _connection(self, scheme: str, place: str) -> tuple[http.client.HTTPConnection, bool]:
        """Return this thread's connection, and whether it was used before: the service may have closed it since."""
        kept: dict[tuple[str, str], http.client.HTTPConnection] = self._threads.__dict__.setdefault("kept", {})
        if (scheme, place) not in kept:
            kept[scheme, place] = self._new_connection(scheme, place)
        return kept[scheme, place], kept[scheme, place].sock is not None

    def _new_connection(self, scheme: str, place: str) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(place, context=self._context())
        return http.client.HTTPConnection(place)

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._ca is not None:
            context.load_verify_locations(cadata=self._ca.decode("ascii"))
        return context

    def _memory(self) -> _Memory:
        memory: _Memory = self._threads.__dict__.setdefault("memory", _Memory())
        return memory


def _ask(
    connection: http.client.HTTPConnection, target: str, start: int, length: int, cancelled: _Cancelled, *, again: bool
) -> http.client.HTTPResponse:
    """Return the answer that begins with the bytes from `start` on; ask `again` by a new connection if this is gone.

    From its beginning on, `cancelled` ends the connection. Raises OSError, HTTPException, and NotAnswered where another
    answer comes.
    """
    try:
        if connection.sock is None:
            _connect(connection)
        cancelled.ends(connection.sock)
        connection.request("GET", target, headers={"Range": f"bytes={start}-{start + length - 1}"})
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException):
        cancelled.ends(None)
        connection.close()
        if not again:
            raise
        return _ask(connection, target, start, length, cancelled, again=False)
    if answer.status not in (200, 206) or _begin(answer.getheader("Content-Range", "")) != start:
        raise NotAnswered
    return answer


def _connect(connection: http.client.HTTPConnection) -> None:
    """Connect, for which a cancellation has to wait."""
    connection.timeout = CONNECT_SECONDS
    connection.connect()
    connection.sock.settimeout(TIMEOUT_SECONDS)


def _begin(content_range: str) -> int | None:
    """Return where `bytes 100-199/1024` begins."""
    with suppress(ValueError):
        return int(content_range.removeprefix("bytes ").partition("-")[0])
    return None


class _Cancelled:
    """Ends a read in another thread: its connection is shut, so that it does not wait for a service that is silent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = False

    def ends(self, connection: socket.socket | None) -> None:
        """From now on, a cancellation ends this connection."""
        with self._lock:
            self._socket = connection
            self._end()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            self._end()

    def _end(self) -> None:
        if self._cancelled and self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Memory:
    """Memory that one thread uses again for each chunk: new memory would be cleared by the kernel, page by page."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def of(self, size: int) -> memoryview:
        if len(self._view) < size:
            self._view = memoryview(mmap.mmap(-1, max(size, BUFFER_BYTES)))
        return self._view[:size]


class _SignedPart:
    """The body of an answer."""

    def __init__(self, answer: http.client.HTTPResponse, size: int, memory: _Memory) -> None:
        self._answer = answer
        self._left = size
        self._memory = memory

    def take(self, size: int) -> memoryview:
        size = min(size, self._left)
        view, done = self._memory.of(size), 0
        while done < size:
            try:
                count = self._answer.readinto(view[done:])
            except (OSError, http.client.HTTPException) as error:
                raise PartBroken(f"{self._left - done} bytes did not arrive: {error}") from error
            if not count:
                raise PartBroken(f"{self._left - done} bytes did not arrive")
            done += count
        self._left -= size
        return view

    def finish(self) -> bool:
        """Return whether the connection can be used again: all was taken, and the answer has no more."""
        with suppress(OSError, http.client.HTTPException):
            return not self._left and not self._answer.length and self._answer.read() == b""
        return False

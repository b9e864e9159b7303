"""Parts of objects from services that answer them with status 200 in place of 206, as rclone's S3 server does.

The client library refuses such an answer, although it has the right header and content. Whole objects in place of parts
are slow there: the server computes a digest of each. So the part is asked for by a signed URL.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

VALID = timedelta(minutes=5)
TIMEOUT_SECONDS = 60.0
READ_BYTES = 1 << 20


class SignedRanges:
    """Reads parts; each thread has a connection of its own, which is kept."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = threading.local()

    async def get(self, path: str, start: int, length: int) -> memoryview | None:
        """Return a part of an object; None where the service or the way to it needs more than this can."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            url = await obstore.sign_async(self._store, "GET", path, VALID)  # type: ignore[call-overload]
            return await asyncio.to_thread(self._get, url, start, length)
        except (BaseError, OSError, http.client.HTTPException, ValueError, TypeError):
            return None  # the whole object will be asked for, which names what is wrong

    def _get(self, url: str, start: int, length: int) -> memoryview | None:
        parts = urlsplit(url)
        connection = self._connection(parts.scheme, parts.netloc)
        try:
            connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": _words(start, length)})
            answer = connection.getresponse()
            if answer.status in (200, 206) and _begin(answer.getheader("Content-Range", "")) == start:
                return _body(answer, length)
        except BaseException:
            connection.close()
            raise
        connection.close()  # with the rest of an answer that is not needed
        return None

    def _connection(self, scheme: str, place: str) -> http.client.HTTPConnection:
        kept: dict[tuple[str, str], http.client.HTTPConnection] = self._threads.__dict__.setdefault("kept", {})
        if (scheme, place) not in kept:
            kept[scheme, place] = (
                http.client.HTTPSConnection(place, timeout=TIMEOUT_SECONDS, context=ssl.create_default_context())
                if scheme == "https"
                else http.client.HTTPConnection(place, timeout=TIMEOUT_SECONDS)
            )
        return kept[scheme, place]


def _words(start: int, length: int) -> str:
    return f"bytes={start}-{start + length - 1}"


def _begin(content_range: str) -> int | None:
    """Return where `bytes 100-199/1024` begins."""
    with suppress(ValueError):
        return int(content_range.removeprefix("bytes ").partition("-")[0])
    return None


def _body(answer: http.client.HTTPResponse, length: int) -> memoryview:
    """Return the body, at most `length` bytes, without a copy on the way."""
    size = min(length, int(answer.getheader("Content-Length", "")))
    view = memoryview(bytearray(size))
    done = 0
    while done < size:
        count = answer.readinto(view[done : done + READ_BYTES])
        if not count:
            raise http.client.IncompleteRead(b"", size - done)
        done += count
    answer.read()  # so that the connection can be used again
    return view

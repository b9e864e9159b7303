"""One blob to an image registry: skipped where it is there, mounted from another repository, or sent.

A small blob is sent by one request, a larger one in parts. A part that breaks off is continued where the registry has
stopped. A registry that takes no parts gets the whole blob by one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum

import httpx

from kybernate.export.documents import Descriptor
from kybernate.export.registry_client import ATTEMPTS, ImageRegistryClient, Stopped, refusal
from kybernate.node.failure import Failure, Unavailable

PART = 8 << 20  # bytes of one request
BYTES = "application/octet-stream"

Pieces = Callable[[], Iterable[bytes | memoryview]]


class Sent(StrEnum):
    """What became of a blob."""

    KNOWN = "known"
    MOUNTED = "mounted"
    SENT = "sent"


def upload(client: ImageRegistryClient, descriptor: Descriptor, pieces: Pieces) -> Sent:
    """Bring a blob into the repository; `pieces` gives its bytes, again at each call.

    Raises Failure and Unavailable; the upload is given up then, and its blob is not there.
    """
    if client.has_blob(descriptor):
        return Sent.KNOWN
    place = client.begin_upload(descriptor)
    if place is None:
        return Sent.MOUNTED
    session = _Upload(client, descriptor, place)
    try:
        session.send(pieces)
    except BaseException:
        session.give_up()
        raise
    return Sent.SENT


class _Upload:
    def __init__(self, client: ImageRegistryClient, descriptor: Descriptor, place: httpx.URL) -> None:
        self._client, self._descriptor, self._place = client, descriptor, place

    def send(self, pieces: Pieces) -> None:
        if self._descriptor.size > PART and not self._in_parts(pieces):
            self._place = self._begin_again()
            self._finish(lambda: (bytes(piece) for piece in pieces()), str(self._descriptor.size))
        elif self._descriptor.size > PART:
            self._finish(lambda: b"", "0")
        else:
            content = b"".join(pieces())
            self._finish(lambda: content, str(len(content)))

    def give_up(self) -> None:
        """Have the registry forget what it got."""
        with suppress(Failure, Stopped, httpx.HTTPError):
            self._client.forget(self._place)

    def _in_parts(self, pieces: Pieces) -> bool:
        """Send the blob in parts; return False where the registry takes none."""
        offset = 0
        for part in parts(pieces(), PART):
            if not self._part(part, offset):
                return False
            offset += len(part)
        return True

    def _part(self, part: bytes, offset: int) -> bool:
        """Send one part from `offset` on, with what it takes; return False where the registry takes no parts."""
        done = 0
        for attempt in range(ATTEMPTS):
            try:
                response = self._client.once(
                    "PATCH", self._place, part[done:], self._headers(offset + done, part[done:])
                )
                if response.status_code in (202, 201, 204):
                    self._place = self._client.location(response)
                    return True
                if response.status_code in (404, 405, 411, 415, 501) and offset == 0:
                    return False
                if response.status_code != 416 and response.status_code < 500 and response.status_code != 429:
                    raise refusal(response, f"{self._client.reference} cannot be pushed")
            except httpx.TransportError as error:
                self._client.failed(error, attempt)
            else:
                self._client.pause(attempt, response.headers.get("retry-after", ""))
            done = self._received() - offset
            if not 0 <= done <= len(part):
                raise Unavailable(f"{self._client.reference.host} has lost a part of an upload")
            if done == len(part):
                return True
        raise Unavailable(f"{self._client.reference.host} takes a part of an upload never as a whole")

    def _headers(self, start: int, part: bytes) -> dict[str, str]:
        return {"Content-Type": BYTES, "Content-Range": f"{start}-{start + len(part) - 1}"}

    def _received(self) -> int:
        """Return how many bytes the registry has of the upload."""
        response = self._client.call("GET", self._place)
        if response.status_code not in (204, 202, 200):
            raise refusal(response, f"{self._client.reference} cannot be pushed")
        if "location" in response.headers:
            self._place = self._client.location(response)
        last = response.headers.get("range", "").rpartition("-")[2]
        end = int(last) if last.isascii() and last.isdigit() and len(last) < 20 else 0
        return end + 1 if end else 0  # 0-0 is what registries say of nothing

    def _finish(self, content: Callable[[], bytes | Iterator[bytes]], length: str) -> None:
        url = self._place.copy_merge_params({"digest": self._descriptor.digest})
        headers = {"Content-Type": BYTES, "Content-Length": length}
        response = self._client.attempts(lambda: self._client.once("PUT", url, content(), headers))
        if response.status_code in (404, 416) and self._client.has_blob(self._descriptor):
            return  # the answer to an earlier attempt was lost
        self._client.require(response, {201, 204}, f"{self._client.reference} cannot be pushed")

    def _begin_again(self) -> httpx.URL:
        self.give_up()
        place = self._client.begin_upload(self._descriptor)
        assert place is not None
        return place


def parts(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield pieces as parts of `size` bytes, the last one shorter."""
    found = bytearray()
    for piece in pieces:
        found += piece
        while len(found) >= size:
            yield bytes(found[:size])
            del found[:size]
    if found:
        yield bytes(found)

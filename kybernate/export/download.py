"""A blob of an image registry as a stream: several ranged requests in parallel, resumed where one breaks off.

The parts are given in order, so that nothing is stored before it is compared. A registry that ignores ranges gives the
blob in one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from kybernate.export.documents import ArtefactInvalid, Descriptor
from kybernate.export.registry_client import ATTEMPTS, ImageRegistryClient, refusal
from kybernate.node.failure import Unavailable

PART = 8 << 20  # bytes of one request


def blob(client: ImageRegistryClient, descriptor: Descriptor) -> Iterator[bytes]:
    """Yield a blob's bytes, uncompared. Raises Unavailable and Failure."""
    starts = range(0, descriptor.size, PART)
    if len(starts) < 2:
        yield from _whole(client, descriptor)
        return
    first = _part(client, descriptor, 0)
    if first is None:
        yield from _whole(client, descriptor)
        return
    yield first
    yield from _parallel(client, descriptor, starts[1:])


def _parallel(client: ImageRegistryClient, descriptor: Descriptor, starts: range) -> Iterator[bytes]:
    pool = ThreadPoolExecutor(client.how.parallel, "download")
    waiting: deque[Future[bytes | None]] = deque()
    try:
        for start in starts:
            waiting.append(pool.submit(_part, client, descriptor, start))
            if len(waiting) > client.how.parallel:
                yield _given(waiting.popleft())
        while waiting:
            yield _given(waiting.popleft())
    except BaseException:
        client.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _given(part: Future[bytes | None]) -> bytes:
    found = part.result()
    if found is None:
        raise Unavailable("the image registry ignores the range of a request, after it kept to another")
    return found


def _part(client: ImageRegistryClient, descriptor: Descriptor, start: int) -> bytes | None:
    """Return the bytes from `start` on, None where the registry ignores ranges."""
    size = min(PART, descriptor.size - start)
    found = bytearray()
    for attempt in range(ATTEMPTS):
        try:
            if not _append(client, descriptor, start, size, found):
                return None
            if len(found) == size:
                return bytes(found)
        except Unavailable:
            if attempt == ATTEMPTS - 1:
                raise
        client.pause(attempt)
    raise Unavailable(f"blob {descriptor.digest} ends too early, again and again")


def _append(client: ImageRegistryClient, descriptor: Descriptor, start: int, size: int, found: bytearray) -> bool:
    """Add what one request gives; return whether the registry knows ranges."""
    wanted = {"Range": f"bytes={start + len(found)}-{start + size - 1}", "Accept-Encoding": "identity"}
    with client.streamed("GET", client.blob_url(descriptor), headers=wanted) as response:
        if response.status_code == httpx.codes.OK:
            return False
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            raise refusal(response, f"blob {descriptor.digest} cannot be pulled")
        for piece in client.pieces(response):
            found += piece
            if len(found) > size:
                raise ArtefactInvalid(f"blob {descriptor.digest}: more bytes than were requested")
    return True


def _whole(client: ImageRegistryClient, descriptor: Descriptor) -> Iterator[bytes]:
    """Yield the blob of one request; one that breaks off is resumed by reading from its begin."""
    done = 0
    for attempt in range(ATTEMPTS):
        try:
            for piece in _from_begin(client, descriptor, done):
                done += len(piece)
                yield piece
            if done >= descriptor.size:
                return
        except Unavailable:
            if attempt == ATTEMPTS - 1:
                raise
        client.pause(attempt)
    raise Unavailable(f"blob {descriptor.digest} ends too early, again and again")


def _from_begin(client: ImageRegistryClient, descriptor: Descriptor, skip: int) -> Iterator[bytes]:
    headers = {"Accept-Encoding": "identity"}
    with client.streamed("GET", client.blob_url(descriptor), headers=headers) as response:
        client.require(response, {200}, f"blob {descriptor.digest} cannot be pulled")
        for piece in client.pieces(response):
            rest = piece[skip:]
            skip -= len(piece) - len(rest)
            if rest:
                yield rest

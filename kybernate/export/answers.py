"""Answers of image registries, bounded: the operator of one chooses their bytes.

httpx reads a body to its end, and decompresses it, wherever it needs one: of a refusal, of a token, before a redirect.
So the limit is on the stream itself. Only the bytes of blobs have none here, whose reader counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import httpx

from kybernate.export.documents import MOST_DOCUMENT
from kybernate_shim import bounded_json

MOST_BYTES: Final = MOST_DOCUMENT + (1 << 20)  # more than of a manifest, which its reader refuses in better words
MOST_NESTED: Final = 8
BLOB: Final = "kybernate.blob"  # an extension of requests for blobs
PLAIN: Final = frozenset({"", "identity"})


def bound(response: httpx.Response) -> None:
    """Limit the body of an answer, as a hook of httpx that sees it before it is read. Raises RemoteProtocolError."""
    if response.request.extensions.get(BLOB) and response.status_code in (200, 206):
        return
    if (encoding := response.headers.get("content-encoding", "").lower()) not in PLAIN:
        raise httpx.RemoteProtocolError(f"an answer in {encoding[:40]!r}, which was not asked for")
    assert isinstance(response.stream, httpx.SyncByteStream), "of a client that is not asynchronous"
    response.stream = _Bounded(response.stream)


def document_of(response: httpx.Response) -> Any:
    """Return the JSON value that is an answer's body. Raises ValueError and httpx.HTTPError."""
    return bounded_json.parse(response.read(), most_bytes=MOST_BYTES, most_nested=MOST_NESTED)


class _Bounded(httpx.SyncByteStream):
    """A body that ends with an error where it is too long."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left = MOST_BYTES
        for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise httpx.RemoteProtocolError(f"an answer of more than {MOST_BYTES} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()

"""A request's body as it arrives: its first bytes for routing, all of it for filters, the rest as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import StreamReader, web

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.engine import Refused
from kybernate.proxy.model_field import Value, fields_of
from kybernate.proxy.settings import Limits

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Body:
    """The body of one request. `sent` says that a byte of it went upstream, after which it cannot be sent again."""

    def __init__(self, request: web.BaseRequest, limits: Limits) -> None:
        self._request, self._limits = request, limits
        self._content: StreamReader = request.content
        self.prefix = bytearray()
        self.kind = request.headers.get("content-type", "").lower()
        self.length = request.content_length
        self.exists = request.body_exists
        self.sent = False
        self.refusal: Refusal | None = None  # why the stream ended before its end
        self._received = 0
        self._expects = request.headers.get("expect") is not None and request.version >= (1, 1)
        if self.length is not None and self.length > limits.body:
            raise Refused(self._too_large(limits.body))

    @property
    def whole(self) -> bool:
        """Return whether `prefix` is all of it."""
        return not self.exists or self._content.at_eof()

    async def fields(self, wanted: frozenset[str]) -> dict[str, Value]:
        """Return the fields that the first bytes have. Raises Refused for a client that is too slow."""
        scanner = fields_of(self._request.headers.get("content-type", ""), wanted)
        if scanner is None or not self.exists:
            return {}
        scanner.feed(bytes(self.prefix[: self._limits.prefix]))
        while not scanner.done and len(self.prefix) < self._limits.prefix:
            piece = await self._next()
            if not piece:
                break
            scanner.feed(piece[: self._limits.prefix - len(self.prefix)])
            self.prefix += piece
        return scanner.found

    async def read_whole(self) -> bytes:
        """Return all of it, for filters. Raises Refused where it is larger than they may be."""
        while len(self.prefix) <= self._limits.filtered:
            if not (piece := await self._next()):
                return bytes(self.prefix)
            self.prefix += piece
        raise Refused(self._too_large(self._limits.filtered))

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield all of it, as it arrives. What goes wrong is in `refusal`, and ends the stream with Refused."""
        self.sent = True
        if self.prefix:
            yield bytes(self.prefix)
            self.prefix.clear()
        try:
            while piece := await self._next():
                yield piece
        except Refused as refused:
            self.refusal = refused.refusal
            raise

    async def _next(self) -> bytes:
        """Return the next bytes, b"" at the end."""
        if self._content.at_eof():
            return b""
        if self._expects:
            self._expects = False
            if (transport := self._request.transport) is not None and not self._content.total_bytes:
                transport.write(CONTINUE)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                piece = await self._content.readany()
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise Refused(Refusal(408, "client_slow", f"no byte of the body arrived for {seconds:.0f} s")) from None
        except web.RequestPayloadError as error:
            raise Refused(Refusal(400, "bad_framing", f"the body is malformed: {error}")) from error
        self._received += len(piece)
        if self._received > self._limits.body:
            raise Refused(self._too_large(self._limits.body))
        return piece

    @staticmethod
    def _too_large(most: int) -> Refusal:
        return Refusal(413, "body_too_large", f"the body is larger than {most} bytes, which is the limit here")

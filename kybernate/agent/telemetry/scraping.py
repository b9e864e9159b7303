"""The port for Prometheus: HTTP/1.1 on the event loop, for every client that reaches its address, and so within limits.

A connection has one request, and some seconds for all of it. There are not many of them at a time: one too many
takes the place of the oldest, because Prometheus asks and reads within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import h11

from kybernate.agent.pending import Pending
from kybernate.node.failure import Refused

MOST_CONNECTIONS: Final = 64
SECONDS: Final = 10.0  # for a request and its answer
MOST_HEADERS: Final = 8 << 10
PATHS: Final = (b"/", b"/metrics")

Rendered = tuple[bytes, str]  # content, and its type


@dataclass
class Scraping:
    """The server. `render` returns the metrics in the form that an Accept header asks for; it may block."""

    render: Callable[[str], Rendered]
    _pending: Pending = field(default_factory=Pending)
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    _server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Answer from now on, and return the port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host or None, port, limit=MOST_HEADERS)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Answer no more, and end all connections."""
        if self._server is not None:
            self._server.close()
            self._pending.end_all()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # what is drained has been taken
        try:
            async with self._pending.one("metrics", MOST_CONNECTIONS, SECONDS):
                await self._answer(reader, writer)
        except (Refused, OSError, h11.RemoteProtocolError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        request = await _request(connection, reader)
        status, kind = HTTPStatus.OK, "text/plain"
        if request.method not in (b"GET", b"HEAD"):
            status, content = HTTPStatus.METHOD_NOT_ALLOWED, b"metrics are read with GET\n"
        elif request.target.partition(b"?")[0] not in PATHS:
            status, content = HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n"
        else:
            accept = next((value.decode("latin-1") for name, value in request.headers if name == b"accept"), "")
            async with self._one:  # more at a time would not be faster
                content, kind = await asyncio.to_thread(self.render, accept)
        headers = [("Content-Type", kind), ("Content-Length", str(len(content))), ("Connection", "close")]
        writer.write(connection.send(h11.Response(status_code=status, headers=headers)) or b"")
        if request.method != b"HEAD":
            writer.write(connection.send(h11.Data(data=content)) or b"")
        await writer.drain()
        writer.write_eof()
        with suppress(OSError):
            await reader.read(1)  # until the other end has read it: a reset would take it away


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(MOST_HEADERS))
    if not isinstance(event, h11.Request):
        raise h11.RemoteProtocolError("the connection has ended")
    return event

"""Answers HTTP/1.1 on the TLS port: bytes of the files of open images, `GET /images/TOKEN/NUMBER` with a range.

gRPC copies each message several times, and the agent carries its bytes once more through a socket of its own; images
are tens of GiB. So their bytes go by HTTP, which a client chooses when it connects (ALPN). h11 knows the protocol.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import h11

from kybernate.agent.access.front import Connected
from kybernate.agent.access.relay import Stream
from kybernate.agent.access.roles import NODE, permits
from kybernate.agent.sending.leases import Lease, Leases
from kybernate.node.failure import Failure, Missing

METHOD: Final = f"/{NODE}.Peers/OpenImage"  # who may call it may read
TARGET: Final = re.compile(rb"/images/([0-9a-f]{32})/([0-9]{1,6})")
RANGE: Final = re.compile(rb"bytes=([0-9]{1,18})-([0-9]{1,18})")
MOST_HEADERS: Final = 8 << 10
BLOCK: Final = 2 << 20  # read from the disk, and handed to TLS, at a time; with half of it, a tenth more CPU time
IDLE_SECONDS: Final = 60.0
STALL_SECONDS: Final = 30.0  # in which a client takes a block, or is gone


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Pace:
    """Spreads bytes over time: `limit` bytes a second together, 0 for no limit."""

    limit: Callable[[], int]
    _free_at: float = 0.0

    async def wait(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        if limit := self.limit():
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / limit
            await asyncio.sleep(begin - now)


@dataclass
class ImageFiles:
    """The server. Not more than `reads` requests are answered concurrently; others wait."""

    leases: Leases
    reads: int
    pace: Pace
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.reads)

    async def serve(self, client: Stream, connected: Connected) -> None:
        """Answer the requests of one connection until it ends. Raises OSError."""
        client.writer.transport.set_write_buffer_limits(high=2 * BLOCK)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        try:
            while request := await _next_request(connection, client):
                await self._answer(connection, client, connected, request)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (h11.RemoteProtocolError, TimeoutError, asyncio.IncompleteReadError):
            client.writer.transport.abort()

    async def _answer(
        self, connection: h11.Connection, client: Stream, connected: Connected, request: h11.Request
    ) -> None:
        try:
            caller = _permitted(connected)
            token, number = _target(request)
            with self.leases.reading(token, caller) as lease:
                async with self._slots:
                    await self._send(connection, client, lease, number, request)
        except _Refused as error:
            await _refuse(connection, client, error.status, str(error))
        except Missing as error:
            await _refuse(connection, client, HTTPStatus.GONE, str(error))

    async def _send(
        self, connection: h11.Connection, client: Stream, lease: Lease, number: int, request: h11.Request
    ) -> None:
        if number >= len(lease.image.files):
            raise _Refused(HTTPStatus.NOT_FOUND, f"the image has {len(lease.image.files)} files")
        offset, end = _range(request, lease.image.files[number].size)
        try:
            with lease.image.file(number) as descriptor:
                head = [("Content-Length", str(end - offset)), ("Content-Range", f"bytes {offset}-{end - 1}/*")]
                _write(connection, client, h11.Response(status_code=HTTPStatus.PARTIAL_CONTENT, headers=head))
                while offset < end:
                    count = min(BLOCK, end - offset)
                    await self.pace.wait(count)
                    content = await asyncio.to_thread(os.pread, descriptor, count, offset)
                    if len(content) != count:
                        return client.writer.transport.abort()  # it became shorter: the answer cannot be completed
                    _write(connection, client, h11.Data(data=content))
                    await _drained(client)
                    offset += count
                    lease.sent_bytes += count
        except Failure as error:
            raise _Refused(HTTPStatus.CONFLICT, str(error)) from error
        except OSError as error:  # of the disk, or of the network: the client asks again
            client.writer.transport.abort()
            raise ConnectionAbortedError(str(error)) from error
        _write(connection, client, h11.EndOfMessage())
        return None


def _permitted(connected: Connected) -> str:
    """Return the key of the caller's limits. Raises _Refused."""
    try:
        caller = connected.caller()
    except Failure as error:
        raise _Refused(HTTPStatus.UNAUTHORIZED, str(error)) from error
    if not permits(caller.role, METHOD):
        raise _Refused(HTTPStatus.FORBIDDEN, f"{caller} may not read images")
    return caller.key


def _target(request: h11.Request) -> tuple[str, int]:
    if request.method != b"GET":
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "files are read with GET")
    found = TARGET.fullmatch(request.target)
    if found is None:
        raise _Refused(HTTPStatus.NOT_FOUND, "a file is /images/TOKEN/NUMBER")
    return found[1].decode(), int(found[2])


def _range(request: h11.Request, size: int) -> tuple[int, int]:
    """Return begin and end of what is wanted of a file. Raises _Refused."""
    wanted = next((value for name, value in request.headers if name == b"range"), b"")
    found = RANGE.fullmatch(wanted)
    if found is None:
        raise _Refused(HTTPStatus.BAD_REQUEST, "a request names one range, `bytes=FIRST-LAST`")
    begin, end = int(found[1]), int(found[2]) + 1
    if not begin < end <= size:
        raise _Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"the file has {size} bytes")
    return begin, end


async def _next_request(connection: h11.Connection, client: Stream) -> h11.Request | None:
    """Return the next request, None at the end of the connection. Raises RemoteProtocolError and TimeoutError."""
    request: h11.Request | None = None
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await client.reader.read(MOST_HEADERS))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("a request has no content")
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:
                return None


async def _refuse(connection: h11.Connection, client: Stream, status: HTTPStatus, why: str) -> None:
    content = why.encode(errors="replace")
    _write(connection, client, h11.Response(status_code=status, headers=[("Content-Length", str(len(content)))]))
    _write(connection, client, h11.Data(data=content))
    _write(connection, client, h11.EndOfMessage())
    await _drained(client)


def _write(connection: h11.Connection, client: Stream, event: Any) -> None:
    for part in connection.send_with_data_passthrough(event) or ():
        client.writer.write(part)


async def _drained(client: Stream) -> None:
    async with asyncio.timeout(STALL_SECONDS):
        await client.writer.drain()

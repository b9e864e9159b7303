"""The client: many concurrent calls on one connection to a UNIX socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import TypeVar, cast

from google.protobuf.message import DecodeError, Message

from .codes import Code, RpcError
from .connection import Answered, ClientConnection, ProtocolViolated
from .frames import FrameReader
from .outgoing import Outgoing

RETRY_SECONDS = 0.01  # between attempts to connect to a listener whose backlog is full
NO_METADATA: Mapping[str, str] = {}

Reply = TypeVar("Reply", bound=Message)


class Client:
    """A connection to a server. Calls run concurrently and are answered in any order.

    A connection that has ended stays ended: every call then raises ConnectionError, and the caller connects again.
    """

    def __init__(self, link: _Link, metadata: Mapping[str, str]) -> None:
        self._link = link
        self._metadata = dict(metadata)

    @classmethod
    async def connect(
        cls, path: str, *, metadata: Mapping[str, str] = NO_METADATA, timeout: float | None = None
    ) -> Client:
        """Connect to the socket at `path` within `timeout` seconds; `metadata` goes with every call.

        It waits for a server that is too busy to accept. Raises OSError, including TimeoutError.
        """
        async with asyncio.timeout(timeout):
            connection = await _connected(path)
            try:
                _, link = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(path), sock=connection)
            except BaseException:
                connection.close()
                raise
        return cls(link, metadata)

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended, by either side."""
        return self._link.closed

    async def call(
        self,
        service: str,
        method: str,
        request: Message,
        reply: type[Reply],
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Reply:
        """Call `service`/`method` and return its reply; `metadata` is added to the connection's own.

        Raises RpcError when the server answers with an error, TimeoutError when it has not answered after `timeout`
        seconds (the limit is sent to it, but it may have done its work), ConnectionError when the connection ends
        first, and its subclass ProtocolViolated, which ends the connection, when the server violates the protocol.
        """
        timeout_nano = 0 if timeout is None else max(1, int(timeout * 1e9))
        async with asyncio.timeout(timeout):
            payload = await self._link.call(
                service, method, request.SerializeToString(), self._metadata | dict(metadata), timeout_nano
            )
        try:
            return reply.FromString(payload)
        except DecodeError as error:
            raise RpcError(Code.INTERNAL, f"answer of {service}/{method} cannot be decoded: {error}") from error

    async def close(self) -> None:
        """End the connection; calls in flight raise ConnectionError."""
        self._link.abort()
        await self._link.lost.wait()


class _Link(asyncio.Protocol):
    """Moves bytes between the transport, the state machine and the futures of the callers."""

    __slots__ = ("_core", "_outgoing", "_path", "_reader", "_transport", "_waiting", "lost")

    def __init__(self, path: str) -> None:
        self._path = path
        self._core = ClientConnection()
        self._reader = FrameReader()
        self._transport: asyncio.Transport
        self._outgoing: Outgoing
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.lost = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outgoing = Outgoing(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for item in self._reader.feed(data):
                if answered := self._core.receive(item):
                    self._settle(answered)
        except ProtocolViolated as error:
            self._fail(ProtocolViolated(f"{self._path}: {error}"))
            self.abort()

    def _settle(self, answered: Answered) -> None:
        future = self._waiting[answered.stream]
        if future.done():
            return  # cancelled, but its caller has not run since
        if isinstance(answered.outcome, RpcError):
            future.set_exception(answered.outcome)
        else:
            future.set_result(answered.outcome)

    def pause_writing(self) -> None:
        self._outgoing.pause()

    def resume_writing(self) -> None:
        self._outgoing.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        rest = f", {self._reader.buffered} bytes into a frame" if self._reader.buffered else ""
        self._fail(ConnectionError(f"{self._path}: the connection ended before the answer{rest}"))
        self.lost.set()

    def _fail(self, error: ConnectionError) -> None:
        """Raise the error in every caller that waits, each with its own instance."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(type(error)(*error.args))

    def abort(self) -> None:
        self._transport.abort()

    async def call(
        self, service: str, method: str, payload: bytes, metadata: Mapping[str, str], timeout_nano: int
    ) -> bytes:
        """Send a request and return the payload of its answer."""
        if self.closed:
            raise ConnectionError(f"{self._path}: the connection has ended")
        try:
            stream, frame = self._core.request(service, method, payload, metadata=metadata, timeout_nano=timeout_nano)
        except ConnectionError:  # there will be no other stream
            self.abort()
            raise
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = future
        self._outgoing.write(frame)
        try:
            return await future
        finally:
            self._core.forget(stream)
            del self._waiting[stream]


async def _connected(path: str) -> socket.socket:
    """Return a connected, non-blocking socket.

    asyncio's own connect mistakes the EAGAIN of a full backlog for progress, and continues with a socket that is never
    connected. Source: connect(2), EAGAIN for UNIX sockets.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(path)
            except BlockingIOError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return connection
    except BaseException:
        connection.close()
        raise

"""A server on a real socket for the tests next to this file, and a client that speaks frames instead of calls."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from kybernate_shim.ttrpc import Call, Client, Method, RpcError, Server
from kybernate_shim.ttrpc import ttrpc_pb2 as wire
from kybernate_shim.ttrpc.frames import Frame, FrameReader, Kind, Oversized

SERVICE = "test.Service"
LIMIT_SECONDS = 120  # no test takes as long; what hangs fails here

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LIMIT_SECONDS))


async def echo(request: StringValue, call: Call) -> Message:
    return request


class Gate:
    """A handler that stays until it is let go, and shows how far it got."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.finished = asyncio.Event()

    async def __call__(self, request: StringValue, call: Call) -> Message:
        self.entered.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.finished.set()
        return request


def method(handle: Callable[[Any, Call], Awaitable[Message]], *, cancellable: bool = False) -> Method:
    return Method(StringValue, handle, cancellable=cancellable)


def listen(path: Path, backlog: int = 16) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


@contextlib.asynccontextmanager
async def serving(path: Path, methods: dict[str, Method], **options: Any) -> AsyncIterator[Server]:
    """Serve `methods` and an Echo at `path`; the server has released everything afterwards."""
    server = Server({SERVICE: {"Echo": method(echo)} | methods}, **options)
    await server.start(listen(path))
    try:
        yield server
    finally:
        await server.close(grace=0)
        await until(lambda: server.connected == 0)


async def until(condition: Callable[[], bool]) -> None:
    """Give the event loop turns until `condition` holds; raise TimeoutError when it never does."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110  # what is waited for happens inside the server, which has no signal for it
            await asyncio.sleep(0)


async def say(client: Client, name: str, text: str = "", **options: Any) -> str:
    reply = await client.call(SERVICE, name, StringValue(value=text), StringValue, **options)
    return reply.value


class RawClient:
    """A connection that sends whatever bytes it is given."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = FrameReader()
        self._items: list[Frame | Oversized] = []

    @classmethod
    async def connect(cls, path: Path) -> RawClient:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, str(path))
        return cls(connection)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def request(self, stream: int, name: str, text: str = "", **fields: Any) -> None:
        fields = {"payload": StringValue(value=text).SerializeToString()} | fields
        message = wire.Request(service=SERVICE, method=name, **fields)
        await self.send(Frame(stream, Kind.REQUEST, 0, message.SerializeToString()).encode())

    async def response(self) -> tuple[int, wire.Response]:
        """Return the next answer and its stream; raise EOFError when the connection has ended."""
        while not self._items:
            data = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16)
            if not data:
                raise EOFError
            self._items = self._reader.feed(data)
        item = self._items.pop(0)
        assert isinstance(item, Frame)
        return item.stream, wire.Response.FromString(item.data)

    async def rest(self) -> bytes:
        """Return what comes until the server ends the connection."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16):
                received += data
        return received

    def close(self) -> None:
        self.connection.close()


async def error_of(client: Client, name: str, text: str = "", **options: Any) -> RpcError:
    """Call a method that must fail, and return its error."""
    with pytest.raises(RpcError) as caught:
        await say(client, name, text, **options)
    return caught.value

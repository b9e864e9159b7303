"""The server: one task per call, answers in the order of completion, on any number of connections."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Collection, Coroutine
from typing import Any, cast

from google.protobuf.message import Message

from .codes import Code, RpcError
from .connection import CallRefused, Opened, ServerConnection
from .frames import FrameReader
from .methods import Call, Method, Services, describe, find
from .outgoing import Outgoing
from .peer import Credentials, peer_of, same_user

GRACE_SECONDS = 5.0

OnError = Callable[[Call, Exception], None]


class Server:
    """Serves `services`, a table of method tables by service name, on one listening UNIX socket.

    Guarantees for a call:
    - It is answered once, whatever its handler does: with its reply, with the RpcError it raised, or with UNKNOWN and
      the text of any other exception, which `on_error` gets as well.
    - When its deadline passes, DEADLINE_EXCEEDED is answered immediately, and the handler's own answer will be dropped.
    - When the caller no longer waits, because of the deadline or because the connection is lost, the handler still
      completes what it began; only a cancellable one is cancelled.

    A peer that `authorize` refuses is disconnected before a byte of it is read, and one that lets 16 MiB of answers
    wait is disconnected too. Nothing that one peer sends touches the connection of another.
    """

    def __init__(
        self,
        services: Services,
        *,
        authorize: Callable[[Credentials], bool] | None = same_user,
        on_error: OnError | None = None,
    ) -> None:
        self._services = services
        self._authorize = authorize
        self._on_error = on_error
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself only remembers tasks weakly
        self._listening: asyncio.Server | None = None
        self._closed = False

    @property
    def connected(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    @property
    def running(self) -> int:
        """Return the number of handlers that have not ended, including those whose callers have gone."""
        return len(self._tasks)

    async def start(self, listener: socket.socket) -> None:
        """Take over `listener`, which is bound and listens; clients that have connected to it before are served.

        The socket's file belongs to the caller: it is never removed here.
        """
        loop = asyncio.get_running_loop()
        backlog = socket.SOMAXCONN  # asyncio calls listen again, and would reduce the queue to 100
        if sys.version_info >= (3, 13):
            self._listening = await loop.create_unix_server(
                lambda: _Connection(self), sock=listener, backlog=backlog, cleanup_socket=False
            )
        else:
            self._listening = await loop.create_unix_server(lambda: _Connection(self), sock=listener, backlog=backlog)

    async def stop_accepting(self) -> None:
        """Close the listening socket; connections that are open continue."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def close(self, *, grace: float = GRACE_SECONDS) -> None:
        """Answer what is in flight, for at most `grace` seconds, and drop every connection.

        New calls are refused and cancellable ones cancelled immediately. Handlers that outlive the grace period are
        cancelled too.
        It may be called by a handler. It does not wait for that one, whose caller sees the connection end.
        """
        await self.stop_accepting()
        self._closed = True
        deadline = asyncio.get_running_loop().time() + grace
        for connection in self._connections:
            connection.drain()
        await self._wait_for(self._tasks - {asyncio.current_task()}, deadline)
        for connection in self._connections:
            connection.close()
        await self._wait_for({connection.lost for connection in self._connections}, deadline)
        for connection in self._connections:
            connection.abort()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    @staticmethod
    async def _wait_for(what: Collection[asyncio.Future[None]], deadline: float) -> None:
        if what:
            await asyncio.wait(what, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))

    def _accepts(self, peer: Credentials) -> bool:
        """Judge a new connection. It may have been accepted just before the server closed."""
        return not self._closed and (self._authorize is None or self._authorize(peer))


class _Connection(asyncio.Protocol):
    """One client's connection: moves bytes between the transport, the state machine and the handlers' tasks."""

    __slots__ = ("_cancellable", "_core", "_outgoing", "_peer", "_reader", "_server", "_transport", "lost")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._core = ServerConnection()
        self._reader = FrameReader()
        self._cancellable: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport
        self._outgoing: Outgoing
        self._peer: Credentials
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outgoing = Outgoing(self._transport)
        accepted = False
        try:
            self._peer = peer_of(transport)
            accepted = self._server._accepts(self._peer)
        finally:  # an `authorize` that raises must admit no peer
            if not accepted:
                self.abort()
        if accepted:
            self._server._connections.add(self)

    def data_received(self, data: bytes) -> None:
        for item in self._reader.feed(data):
            if self._transport.is_closing():
                return
            event = self._core.receive(item)
            if isinstance(event, CallRefused):
                self._write(event.frame)
            elif event is not None:
                self._begin(event)

    def pause_writing(self) -> None:
        self._outgoing.pause()

    def resume_writing(self) -> None:
        self._outgoing.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._connections.discard(self)
        self._cancel_waiting()
        self.lost.set_result(None)

    def drain(self) -> None:
        self._core.drain()
        self._cancel_waiting()

    def close(self) -> None:
        self._outgoing.close()

    def abort(self) -> None:
        self._transport.abort()

    def _begin(self, opened: Opened) -> None:
        """Start the task of a call, and the clock of its deadline."""
        loop = asyncio.get_running_loop()
        stream, request = opened
        try:
            method, message = find(self._server._services, request)
        except RpcError as error:
            self._write(self._core.fail(stream, error.code, error.message))
            self._core.release(stream)
            return
        call = describe(request, loop.time(), self._peer)
        task = _begun(loop, self._serve(stream, method, message, call), f"{call.service}/{call.method}")
        if task.done():
            self._end(stream, task, None)
            return
        self._server._tasks.add(task)
        if method.cancellable:
            self._cancellable[stream] = task
        timer = loop.call_at(call.deadline, self._expire, stream) if call.deadline is not None else None
        task.add_done_callback(lambda task: self._end(stream, task, timer))

    async def _serve(self, stream: int, method: Method, message: Message, call: Call) -> None:
        try:
            reply = await method.handle(message, call)
            self._write(self._core.answer(stream, reply.SerializeToString()))
        except RpcError as error:
            self._write(self._core.fail(stream, error.code, error.message))
        except Exception as error:  # noqa: BLE001  # a fault of one handler is that call's answer, not our end
            self._write(self._core.fail(stream, Code.UNKNOWN, str(error) or type(error).__name__))
            if self._server._on_error is not None:
                self._server._on_error(call, error)

    def _expire(self, stream: int) -> None:
        self._write(self._core.fail(stream, Code.DEADLINE_EXCEEDED, "the deadline of the call has passed"))
        if task := self._cancellable.get(stream):
            task.cancel()

    def _end(self, stream: int, task: asyncio.Task[None], timer: asyncio.TimerHandle | None) -> None:
        """Clean up after a call. Not done by the task itself, which may be cancelled before its first step."""
        if timer is not None:
            timer.cancel()
        if task.cancelled():
            self._write(self._core.fail(stream, Code.CANCELED, "the call was cancelled"))
        self._core.release(stream)
        self._cancellable.pop(stream, None)
        self._server._tasks.discard(task)

    def _cancel_waiting(self) -> None:
        for task in self._cancellable.values():
            task.cancel()

    def _write(self, frame: bytes) -> None:
        if frame:
            self._outgoing.write(frame)


def _begun(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Return a task that does `work`; the part up to the first wait is already done with Python 3.12 and newer."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    return loop.create_task(work, name=name)

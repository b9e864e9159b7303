"""Both ends of a connection as state machines without I/O: which streams are legal, and which answer each gets.

Only unary calls are supported: one request and one response, on a separate stream. Streams that a peer wants to keep
open are answered with UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from google.protobuf.message import DecodeError

from . import ttrpc_pb2 as wire
from .codes import Code, RpcError
from .frames import KNOWN_KINDS, MAX_DATA, Flags, Frame, Kind, Oversized

MAX_CALLS = 4096  # of one connection, at a time
MAX_HELD = 64 << 20  # bytes of their requests
MAX_MESSAGE = 64 << 10  # bytes of an error's text
LAST_STREAM = (1 << 32) - 1
ENDING = (0, Flags.REMOTE_CLOSED)  # the flags of a frame that ends its stream


class ProtocolViolated(ConnectionError):
    """The server has sent what the protocol does not allow; the message shows it. The connection is unusable."""


class Opened(NamedTuple):
    """A call to be served; it occupies its connection until `ServerConnection.release`."""

    stream: int
    request: wire.Request


class CallRefused(NamedTuple):
    """A call that ends before it began; `frame` is its answer."""

    stream: int
    code: Code
    frame: bytes


class Answered(NamedTuple):
    """The end of a call: its payload, or the error that came instead."""

    stream: int
    outcome: bytes | RpcError


class _State(Enum):
    OPEN = "open"  # the handler runs, the caller waits
    ANSWERED = "answered"  # the handler may still run, its answer is dropped


class _Stream:
    __slots__ = ("size", "state")

    def __init__(self, size: int) -> None:
        self.size = size
        self.state = _State.OPEN


class ServerConnection:
    """The server's end. Every legal request is answered once, in any order; illegal ones are answered immediately."""

    __slots__ = ("_draining", "_held", "_last", "_max_calls", "_max_held", "_streams")

    def __init__(self, *, max_calls: int = MAX_CALLS, max_held: int = MAX_HELD) -> None:
        self._max_calls = max_calls
        self._max_held = max_held
        self._streams: dict[int, _Stream] = {}
        self._held = 0
        self._last = 0
        self._draining = False

    @property
    def active(self) -> int:
        """Return the number of calls that occupy the connection."""
        return len(self._streams)

    def receive(self, item: Frame | Oversized) -> Opened | CallRefused | None:
        """Return what a frame of the client requests; None when it requests nothing.

        Frames of unknown kinds, responses, and data for a stream that was opened before are ignored.
        """
        try:
            if item.kind == Kind.REQUEST:
                return self._open(item)
            if item.kind == Kind.DATA and item.stream > self._last:
                raise RpcError(Code.INVALID_ARGUMENT, f"stream {item.stream} was never opened")
        except RpcError as error:
            return CallRefused(item.stream, error.code, failure(item.stream, error.code, error.message))
        return None

    def answer(self, stream: int, payload: bytes) -> bytes:
        """Return the frame that ends a call successfully, or nothing when the call was answered before.

        A payload that is too large for a frame becomes RESOURCE_EXHAUSTED.
        """
        data = wire.Response(payload=payload).SerializeToString()
        if len(data) > MAX_DATA:
            return self.fail(stream, Code.RESOURCE_EXHAUSTED, f"answer of {len(data)} bytes, at most {MAX_DATA} fit")
        return Frame(stream, Kind.RESPONSE, 0, data).encode() if self._end(stream) else b""

    def fail(self, stream: int, code: Code, message: str) -> bytes:
        """Return the frame that ends a call with an error, or nothing when the call was answered before."""
        return failure(stream, code, message) if self._end(stream) else b""

    def release(self, stream: int) -> None:
        """Forget a call whose handler has ended, which makes room for another one."""
        self._held -= self._streams.pop(stream).size

    def drain(self) -> None:
        """Refuse every further call with UNAVAILABLE; those that are open may still be answered."""
        self._draining = True

    def _open(self, item: Frame | Oversized) -> Opened:
        self._take_id(item.stream)
        if isinstance(item, Oversized):
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"request of {item.length} bytes, at most {MAX_DATA} are allowed")
        if item.flags & Flags.REMOTE_OPEN:
            raise RpcError(Code.UNIMPLEMENTED, "streaming calls: not implemented")
        if self._draining:
            raise RpcError(Code.UNAVAILABLE, "the server is closing: unavailable")
        if len(self._streams) >= self._max_calls or self._held + len(item.data) > self._max_held:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"{len(self._streams)} calls are open on this connection")
        try:
            request = wire.Request.FromString(item.data)
        except DecodeError as error:
            raise RpcError(Code.INVALID_ARGUMENT, f"request cannot be decoded: {error}") from error
        if request.timeout_nano < 0:
            raise RpcError(Code.DEADLINE_EXCEEDED, "the deadline had passed before the call")
        self._streams[item.stream] = _Stream(len(item.data))
        self._held += len(item.data)
        return Opened(item.stream, request)

    def _take_id(self, stream: int) -> None:
        if stream % 2 == 0:
            raise RpcError(Code.INVALID_ARGUMENT, f"stream {stream}: a client's streams have odd ids")
        if stream <= self._last:
            raise RpcError(Code.INVALID_ARGUMENT, f"stream {stream}: ids must increase, the last was {self._last}")
        self._last = stream

    def _end(self, stream: int) -> bool:
        """Mark a call as answered and return whether it was not."""
        entry = self._streams[stream]
        first = entry.state is _State.OPEN
        entry.state = _State.ANSWERED
        return first


class ClientConnection:
    """The client's end. Assigns stream ids and matches answers with them, in whatever order they arrive.

    Abandoned calls are remembered until their answers arrive; at most `max_given_up` may lack one.
    """

    __slots__ = ("_given_up", "_max_given_up", "_next", "_open")

    def __init__(self, *, first_stream: int = 1, max_given_up: int = MAX_CALLS) -> None:
        self._next = first_stream
        self._max_given_up = max_given_up
        self._open: set[int] = set()
        self._given_up: set[int] = set()

    def request(
        self, service: str, method: str, payload: bytes, *, metadata: Mapping[str, str], timeout_nano: int = 0
    ) -> tuple[int, bytes]:
        """Open a call and return its stream and its frame. `timeout_nano` of 0 sets no deadline.

        Raises RpcError when the request is too large for a frame, ConnectionError when the connection's ids are used
        up, or the server owes too many answers.
        """
        data = wire.Request(
            service=service,
            method=method,
            payload=payload,
            timeout_nano=timeout_nano,
            metadata=[wire.KeyValue(key=key, value=value) for key, value in metadata.items()],
        ).SerializeToString()
        if len(data) > MAX_DATA:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"request of {len(data)} bytes, at most {MAX_DATA} fit")
        stream = self._next
        if stream > LAST_STREAM:
            raise ConnectionError("all stream ids of this connection are used up")
        if len(self._given_up) >= self._max_given_up:
            raise ConnectionError(f"the server has left {len(self._given_up)} calls without an answer")
        self._next += 2
        self._open.add(stream)
        return stream, Frame(stream, Kind.REQUEST, 0, data).encode()

    def receive(self, item: Frame | Oversized) -> Answered | None:
        """Return the answer that a frame of the server brings; None for that of an abandoned call.

        Frames of unknown kinds are ignored. An answer that is too large or cannot be decoded is an error of its call.
        Raises ProtocolViolated for anything else that is not the only answer to a call.
        """
        if item.kind == Kind.RESPONSE and item.flags in ENDING:
            if item.stream in self._open:
                self._open.remove(item.stream)
                return Answered(item.stream, _outcome(item))
            if item.stream in self._given_up:
                self._given_up.remove(item.stream)
                return None
        if item.kind not in KNOWN_KINDS and isinstance(item, Frame):
            return None
        raise ProtocolViolated(f"{self._violation(item)}: {item}")

    def forget(self, stream: int) -> None:
        """Abandon a call, unless it was answered: its answer will be ignored."""
        if stream in self._open:
            self._open.remove(stream)
            self._given_up.add(stream)

    def _violation(self, item: Frame | Oversized) -> str:
        """Return what is wrong with a frame that is not an answer."""
        if item.kind not in KNOWN_KINDS:
            return "a frame is too large"
        if item.stream % 2 == 0 or item.stream >= self._next:
            return "the stream was never opened"
        if item.stream not in self._open and item.stream not in self._given_up:
            return "the stream was closed by its answer"
        return "only a response ends a call" if item.kind != Kind.RESPONSE else "a response ends its stream"


def failure(stream: int, code: Code, message: str) -> bytes:
    """Return the frame of an error. The text is cut after 64 KiB; what is not valid Unicode in it becomes "?"."""
    text = message.encode("utf-8", "replace")[:MAX_MESSAGE].decode("utf-8", "ignore")
    status = wire.Status(code=code or Code.UNKNOWN, message=text)  # OK would read as success
    return Frame(stream, Kind.RESPONSE, 0, wire.Response(status=status).SerializeToString()).encode()


def _outcome(item: Frame | Oversized) -> bytes | RpcError:
    if isinstance(item, Oversized):
        return RpcError(Code.RESOURCE_EXHAUSTED, f"answer of {item.length} bytes, at most {MAX_DATA} are allowed")
    try:
        response = wire.Response.FromString(item.data)
    except DecodeError as error:
        return RpcError(Code.INTERNAL, f"answer cannot be decoded: {error}")
    if not response.status.code:
        return response.payload
    try:
        code = Code(response.status.code)
    except ValueError:  # a code of a later version of gRPC
        code = Code.UNKNOWN
    return RpcError(code, response.status.message)

"""Connections that become something else, such as WebSocket: after the heads, bytes go both ways as they are."""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import Any, Final

from multidict import CIMultiDict

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.embedded.exchange import REQUEST_ID, WAKE_MS, Exchange, Taken
from kybernate.proxy.engine import Refused
from kybernate.proxy.models import CONNECT_SECONDS, place_of

PIECE: Final = 64 << 10
MOST_HEAD: Final = 64 << 10
SWITCHING: Final = 101
INTERIM: Final = frozenset({100, 102, 103})


def wants_upgrade(headers: CIMultiDict[str]) -> bool:
    """Return whether a request asks for another protocol that goes through here."""
    return headers.get("upgrade", "").lower() in ("websocket", "tcp") and "upgrade" in (
        one.strip().lower() for value in headers.getall("connection", ()) for one in value.split(",")
    )


class FromClient:
    """Takes what a client sends after its request's head, in place of the parser of requests."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._pieces: list[bytes] = []
        self._size = 0
        self._event = asyncio.Event()
        self._ended = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._pieces.append(bytes(data))
        self._size += len(data)
        if self._size > PIECE:
            self._protocol.pause_reading()
        self._event.set()
        return False, b""

    def feed_eof(self) -> None:
        self._ended = True
        self._event.set()

    async def read(self) -> bytes:
        """Return what has arrived, b"" at the end."""
        while not self._pieces and not self._ended:
            self._event.clear()
            await self._event.wait()
        found = b"".join(self._pieces)
        self._pieces.clear()
        if self._size > PIECE and self._protocol.transport is not None:
            self._protocol.resume_reading()
        self._size = 0
        return found


async def pass_upgrade(exchange: Exchange, base: str, headers: CIMultiDict[str]) -> Taken:
    """Pass a request that asks for an upgrade, and what follows where it is granted. Raises Refused without an answer.

    An answer that grants none is passed, and the connection ends: what the client sends then passes no route.
    """
    host, port = place_of(base)
    tls = True if base.startswith("https:") else None
    exchange.passed = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_HEAD, ssl=tls)
    except (OSError, TimeoutError) as error:
        raise Refused(Refusal(503, "upstream_unreachable", f"no connection to {base}: {error}", 1.0)) from error
    try:
        writer.write(_head(exchange, headers))
        head = await _answer_head(reader, base)
        while _status(head) in INTERIM:
            head = await _answer_head(reader, base)
        protocol: Any = exchange.request.protocol
        client = protocol.transport
        if client is None:
            return Taken()
        exchange.status, exchange.answered = _status(head), time.monotonic()
        client.write(_marked(exchange, head))
        protocol.keep_alive(False)
        if exchange.status == SWITCHING:
            source = FromClient(protocol)
            protocol.set_parser(source)
            await _both_ways(source, writer, reader, protocol)
        else:
            await _copy_body(head, exchange, reader, protocol)
    finally:
        writer.close()
    if exchange.request.transport is not None:
        exchange.request.transport.close()
    return Taken()


def _head(exchange: Exchange, headers: CIMultiDict[str]) -> bytes:
    lines = [f"{exchange.head.method} {exchange.target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Upgrade: {exchange.head.headers['upgrade']}", "Connection: Upgrade", "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")


async def _answer_head(reader: asyncio.StreamReader, base: str) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
        raise Refused(Refusal(502, "upstream_failed", f"{base} did not answer the request for an upgrade")) from error


def _status(head: bytes) -> int:
    word = head.split(b" ", 2)[1] if head.count(b" ") else b""
    return int(word) if word.isdigit() and len(word) == 3 else 502


def _marked(exchange: Exchange, head: bytes) -> bytes:
    """Return the answer's head with the proxy's own marks; one without an upgrade is the last of its connection."""
    marks = [f"{REQUEST_ID}: {exchange.id}"] + ([f"{WAKE_MS}: {exchange.wake_ms}"] if exchange.cold else [])
    if exchange.status != 101:
        marks.append("Connection: close")
        lines = [one for one in head.split(b"\r\n") if not one.lower().startswith((b"connection:", b"keep-alive:"))]
        head = b"\r\n".join(lines)
    return head[:-2] + "".join(f"{one}\r\n" for one in marks).encode() + b"\r\n"


async def _copy_body(head: bytes, exchange: Exchange, reader: asyncio.StreamReader, protocol: Any) -> None:
    """Pass the body of an answer that grants no upgrade, as long as its head says that it is."""

    async def send(data: bytes) -> bytes:
        if protocol.transport is not None:
            protocol.transport.write(data)
            await protocol._drain_helper()
        return data

    async def pass_on(size: float) -> None:
        while size > 0 and (piece := await reader.read(PIECE if size > PIECE else int(size))):
            size -= len(await send(piece))

    fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    length = fields.get(b"content-length", b"").strip()
    if exchange.head.method == "HEAD" or exchange.status in (204, 304):
        return
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        while size := _chunk_size(await send(await reader.readline())):
            await pass_on(size + 2)
        while (await send(await reader.readline())).strip():
            pass  # trailers
    else:
        await pass_on(int(length) if length.isdigit() else inf)


def _chunk_size(line: bytes) -> int:
    word = line.partition(b";")[0].strip()
    return int(word, 16) if word.isalnum() and set(word.lower()) <= set(b"0123456789abcdef") else 0


async def _both_ways(
    source: FromClient, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, protocol: Any
) -> None:
    """Pass bytes on until one side ends."""

    async def up() -> None:
        while piece := await source.read():
            writer.write(piece)
            await writer.drain()

    async def down() -> None:
        while piece := await reader.read(PIECE):
            if protocol.transport is None:
                return
            protocol.transport.write(piece)
            await protocol._drain_helper()

    tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

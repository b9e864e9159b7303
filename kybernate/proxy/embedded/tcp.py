"""Ports without HTTP: the first connection wakes the model, held bytes are passed on, open connections are activity."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final

from kybernate.proxy.embedded.headers import Networks, is_trusted
from kybernate.proxy.engine import Engine, Refused
from kybernate.proxy.models import CONNECT_SECONDS, place_of
from kybernate.proxy.settings import Limits, Model, TcpRoute
from kybernate_shim.logs import Log

PIECE: Final = 64 << 10
ALIVE_SECONDS: Final = 60  # without a byte, after which the kernel asks whether the other side is still there
MAGIC: Final = b"\r\n\r\n\x00\r\nQUIT\n"  # of the PROXY protocol, version 2


class TcpPort:
    """Listens for one route. What a client sends while it is held stays in its socket, so it costs one buffer."""

    def __init__(
        self, route: TcpRoute, model: Model, engine: Engine, limits: Limits, trusted: Networks, log: Log
    ) -> None:
        self._route, self._model, self._engine, self._log = route, model, engine, log
        self._limits, self._trusted = limits, trusted
        self._clients: Counter[str] = Counter()  # connections of each address that has any
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._serve, *self._route.listen, limit=PIECE)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        try:
            with self._counted(writer) as may:
                first = await self._first(reader) if may else b""
                if not may or (self._route.wake_on == "data" and not first):
                    return  # one too many, or a probe that only connects, which wakes nothing
                await self._hold_and_pass(first, reader, writer)
        except Refused as refused:
            self._log.info("proxy.connection_refused", model=self._model.name, reason=refused.refusal.reason)
        except OSError:  # TimeoutError among them
            pass  # one of the two sides is gone or silent, and the other is closed below
        finally:
            writer.close()

    @contextmanager
    def _counted(self, writer: asyncio.StreamWriter) -> Iterator[bool]:
        """Yield whether this client may have one more connection."""
        client = str((writer.get_extra_info("peername") or ("",))[0])
        most = 0 if is_trusted(client, self._trusted) else self._limits.per_client
        self._clients[client] += 1
        try:
            may = not most or self._clients[client] <= most
            if not may:
                self._log.info("proxy.connection_refused", model=self._model.name, reason="per_client")
            yield may
        finally:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    async def _first(self, reader: asyncio.StreamReader) -> bytes:
        """Return the first bytes where these are what wakes; a client that sends none is cut off after some time."""
        if self._route.wake_on != "data":
            return b""
        async with asyncio.timeout(self._limits.idle_seconds):
            return await reader.read(PIECE)

    async def _hold_and_pass(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = asyncio.ensure_future(self._engine.wait(self._model.name, bytes=PIECE))
        held = bytearray(first)
        gone = asyncio.ensure_future(_read_ahead(reader, held))
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and gone.result() == "gone":
                return  # no client is left that would use what wakes
            admission = await waiting
        finally:
            for task in (waiting, gone):
                task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)
        with admission:
            async with asyncio.timeout(CONNECT_SECONDS):
                up_reader, up_writer = await asyncio.open_connection(*place_of(self._model.upstream), limit=PIECE)
            keep_alive(up_writer)
            try:
                if self._route.proxy_protocol:
                    up_writer.write(proxy_header(writer.get_extra_info("peername"), writer.get_extra_info("sockname")))
                up_writer.write(bytes(held))
                await both_ways((reader, writer), (up_reader, up_writer))
            finally:
                up_writer.close()


async def _read_ahead(reader: asyncio.StreamReader, held: bytearray) -> str:
    """Read what a held client sends, as far as it fits; "gone" where it hangs up before."""
    while len(held) < PIECE:
        piece = await reader.read(PIECE - len(held))
        if not piece:
            return "gone"
        held += piece
    return "full"


Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def both_ways(one: Side, other: Side) -> None:
    """Pass bytes on until both directions have ended; an end of one is passed on, so half-closed connections work."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    tasks = [asyncio.ensure_future(copy(one[0], other[1])), asyncio.ensure_future(copy(other[0], one[1]))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel see that the machine of the other side is gone: the model would be busy without an end."""
    one = writer.get_extra_info("socket")
    if one is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_SECONDS)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_SECONDS // 6)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def proxy_header(peer: Any, own: Any) -> bytes:
    """Return the header of the PROXY protocol, version 2, for a connection from `peer` to `own`."""
    source, target = ip_address(peer[0].partition("%")[0]), ip_address(own[0].partition("%")[0])
    family = 0x11 if source.version == 4 else 0x21
    body = source.packed + target.packed + struct.pack("!HH", peer[1], own[1])
    return MAGIC + struct.pack("!BBH", 0x21, family, len(body)) + body

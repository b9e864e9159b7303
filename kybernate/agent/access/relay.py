"""Carries the bytes of one connection to gRPC's own socket and back, until either side ends."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Refused

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, section 3.4: each client begins with it
PREFACE_SECONDS: Final = 10.0
CLOSING_SECONDS: Final = 5.0
CHUNK: Final = 1 << 16


@dataclass
class Stream:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def protocol(self) -> str:
        """The protocol that the client chose in the TLS handshake (ALPN), "" without one."""
        tls = self.writer.get_extra_info("ssl_object")
        return (tls.selected_alpn_protocol() or "") if tls is not None else ""

    async def close(self) -> None:
        """Deliver what is left and end it; a peer that does not take it does not hold this up for long."""
        self.writer.close()
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except OSError:
            pass  # the other end was faster


async def stream_of(connection: socket.socket, **tls: Any) -> Stream:
    """Return the stream of a connection that was accepted; with `tls`, after the handshake. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, **tls)
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def preface_of(client: Stream) -> bool:
    """Read how the client begins: one that does not in time keeps no place. Raises Refused and OSError.

    False: it has connected and left, as a process does that only looks whether the agent runs.
    """
    try:
        async with asyncio.timeout(PREFACE_SECONDS):
            begin = await client.reader.readexactly(len(PREFACE))
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return False
        raise Refused("it has sent too little") from error
    except TimeoutError as error:
        raise Refused(f"it has sent nothing, or too little, in {PREFACE_SECONDS:.0f} s") from error
    if begin != PREFACE:
        raise Refused("it does not speak HTTP/2")
    return True


@asynccontextmanager
async def inside(server: Path) -> AsyncIterator[tuple[str, Stream]]:
    """Connect to gRPC's socket; yield the name by which its `peer()` knows the connection, and the connection.

    `server` lies in a directory that only the agent can enter: no other process can connect, whatever its name. The
    name is a path there, because abstract ones can be taken by others; its file is not needed any more then.
    """
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    name = secrets.token_hex(8)
    path = server.with_name(name)
    try:
        own.bind(str(path))
        try:
            await asyncio.get_running_loop().sock_connect(own, str(server))
        finally:
            path.unlink()
        stream = Stream(*await asyncio.open_unix_connection(sock=own, limit=CHUNK))
    except BaseException:
        own.close()
        raise
    try:
        yield name, stream
    finally:
        await stream.close()


async def both_ways(client: Stream, server: Stream) -> None:
    """Copy in both directions until one of them ends: HTTP/2 has no use for half a connection."""
    copies = {asyncio.create_task(_copy(client, server)), asyncio.create_task(_copy(server, client))}
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in copies:
            one.cancel()
        await asyncio.wait(copies)


async def _copy(source: Stream, target: Stream) -> None:
    try:
        while data := await source.reader.read(CHUNK):
            target.writer.write(data)
            await target.writer.drain()
    except OSError:
        pass  # one side is gone; the other is closed by who opened it

"""The agent's sockets: accepts a connection, learns who has made it, and hands it to gRPC under a name.

gRPC for Python says neither user nor process of a UNIX connection. So each connection is accepted here, where the
kernel or TLS says who it is, and carried to gRPC's own socket from a socket whose name stands for the caller.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kybernate.agent.access.caller import Caller
from kybernate.agent.access.certificates import HTTP
from kybernate.agent.access.limits import Buckets
from kybernate.agent.access.peers import now
from kybernate.agent.access.relay import PREFACE, Stream, both_ways, inside, preface_of
from kybernate.node.failure import Failure

PAUSE_SECONDS: Final = 0.5  # without free descriptors, accepting again immediately would fail again
ENDING_SECONDS: Final = 10.0
REFUSALS_PER_MINUTE: Final = 120  # that have a line in the log


class Connected(Protocol):
    """A caller for as long as its connection lasts."""

    def caller(self) -> Caller:
        """Return who it is by now. Raises Failure where it is not who it was."""


class EntryPoint(Protocol):
    """What distinguishes one kind of socket from another."""

    def enter(
        self, connection: socket.socket, quiet_since: float
    ) -> AbstractAsyncContextManager[tuple[Stream, Connected]]:
        """Learn who has connected, and take one of the caller's places for as long as the connection lasts.

        No connection that is accepted now was made before `quiet_since` (see `peers.process_of`).
        Raises Refused, Failure and OSError.
        """


@dataclass
class Callers:
    """Who is behind each connection of gRPC's sockets, by its name there."""

    _known: dict[str, Connected] = field(default_factory=dict)

    def add(self, name: str, one: Connected) -> None:
        self._known[name] = one

    def remove(self, name: str) -> None:
        del self._known[name]

    def behind(self, peer: str) -> Connected | None:
        """Return who is behind gRPC's `peer()`, None for what did not come through a front."""
        return self._known.get(peer.rpartition("/")[2])


class Handler(Protocol):
    """What answers connections that do not speak gRPC."""

    async def serve(self, client: Stream, connected: Connected) -> None:
        """Answer until the connection ends. Raises OSError."""


@dataclass
class Front:
    """One listening socket, and gRPC's socket `server` that its connections are carried to; `files` answers HTTP."""

    listener: socket.socket
    server: Path
    callers: Callers
    entry_point: EntryPoint
    log: Any
    files: Handler | None = None
    _quiet: float = field(default_factory=now)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _lines: Buckets = field(default_factory=lambda: Buckets(now))
    _left_out: int = 0  # refusals without a line

    def start(self) -> None:
        """Accept from now on."""
        self.listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self.listener, self._accept)

    async def stop(self) -> None:
        """Accept no more, and end all connections. The socket stays open: systemd's is not ours to close."""
        asyncio.get_running_loop().remove_reader(self.listener)
        self.end_all()
        if self._running:
            await asyncio.wait(self._running, timeout=ENDING_SECONDS)

    def end_all(self) -> None:
        """End every connection but the one whose task calls this; clients may connect again."""
        for task in self._running - {asyncio.current_task()}:
            task.cancel()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                self._quiet = now()  # what is accepted later has connected later
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self.log.warning("connections.paused", error=str(error))
                self._pause()
                return
            task = asyncio.create_task(self._serve(connection, self._quiet))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.listener)
        loop.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self.listener, self._accept)

    async def _serve(self, connection: socket.socket, quiet: float) -> None:
        connection.setblocking(False)
        try:
            async with self.entry_point.enter(connection, quiet) as (client, connected):
                if self.files is not None and client.protocol == HTTP:
                    await self.files.serve(client, connected)
                elif await preface_of(client):
                    await self._carry(client, connected)
        except (Failure, OSError) as error:
            self._note_refusal(str(error))
        finally:
            connection.close()

    def _note_refusal(self, reason: str) -> None:
        """Log it, within a limit: connections without end must fill no disk, and leave the log to other lines."""
        if not self._lines.take("refusals", REFUSALS_PER_MINUTE):
            self._left_out += 1
            return
        self.log.info("connection.refused", reason=reason, left_out=self._left_out)
        self._left_out = 0

    async def _carry(self, client: Stream, connected: Connected) -> None:
        async with inside(self.server) as (name, server):
            self.callers.add(name, connected)
            try:
                server.writer.write(PREFACE)
                await both_ways(client, server)
            finally:
                self.callers.remove(name)

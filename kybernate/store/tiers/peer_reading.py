"""The reading of one image from another agent: which parts, in which order, and what follows from a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kybernate.client.errors import AgentRefused, AgentUnreachable
from kybernate.store.in_thread import hurried, in_thread
from kybernate.store.reader import Sink
from kybernate.store.tiers.peer_connection import ImageClosed, PartNotRead, PeerConnection, PeerFailed
from kybernate.store.tiers.tier import Have
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import Manifest

PART: Final = 4 << 20  # bytes; the same in each attempt, since what has arrived is known by its parts
PATIENCE_SECONDS: Final = 120.0  # without a part: the other agent may be started again meanwhile
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds between attempts
PART_SECONDS: Final = 120.0  # for one part; an agent that sends less is not worth waiting for


FOR_NOW: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # gRPC's codes of an agent that ends or begins


class Opened(Protocol):
    """An image that is open at another agent."""

    @property
    def decoded(self) -> Manifest: ...

    @property
    def holes(self) -> Sequence[Sequence[tuple[int, int]]]: ...

    @property
    def token(self) -> str: ...

    async def again(self, token: str) -> None: ...


@dataclass(frozen=True)
class Part:
    """Bytes of the file with that number; `hole`: they are zeros."""

    number: int
    name: str
    offset: int
    size: int
    hole: bool = False


def parts_of(manifest: Manifest, holes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Part]:
    """Yield all parts of an image: CRIU's files first, then those with VRAM, as a restore needs them. Without I/O.

    A part is a hole where all of it is in one. What `holes` says is a hint: the files' digests decide.
    """
    moved = {file.file for file in manifest.moved_files}
    files = list(enumerate(manifest.stored_files))
    for number, file in sorted(files, key=lambda one: one[1].name.removesuffix(".enc") in moved):
        known = sorted(holes[number]) if number < len(holes) else []
        for offset in range(0, file.size, PART):
            size = min(PART, file.size - offset)
            while known and sum(known[0]) <= offset:
                known.pop(0)
            hole = bool(known) and known[0][0] <= offset and offset + size <= sum(known[0])
            yield Part(number, file.name, offset, size, hole)


class Reading:
    """Gives a sink the parts that the receiver does not have."""

    def __init__(
        self, image: Opened, sink: Sink, transfer: Transfer, have: Have, connect: Callable[[], PeerConnection]
    ) -> None:
        self._image, self._sink, self._transfer, self._have, self._connect = image, sink, transfer, have, connect
        self._heard = time.monotonic()
        self._opening = asyncio.Lock()

    async def run(self) -> None:
        """Read all. Raises PeerFailed, OSError of the sink."""
        self._transfer.begins(sum(file.size for file in self._image.decoded.stored_files))
        parts = self._missing()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._transfer.parallel):
                    group.create_task(self._read_all(parts))
        except ExceptionGroup as group:  # of several parts; the first error counts
            raise group.exceptions[0] from group

    def _missing(self) -> Iterator[Part]:
        for part in parts_of(self._image.decoded, self._image.holes):
            if self._have.has(part.name, part.offset, part.size):
                self._transfer.done(done_bytes=part.size, known_bytes=part.size)
            elif part.hole:
                self._sink.zeros(part.name, part.offset, part.size)
                self._transfer.done(done_bytes=part.size, zero_bytes=part.size)
            else:
                yield part

    async def _read_all(self, parts: Iterator[Part]) -> None:
        """Read parts, one after the other, until none is left."""
        connection = self._connect()
        try:
            for part in parts:
                await self._transfer.pace(part.size)
                content = await self._read(connection, part)
                await in_thread(self._sink.write, part.name, part.offset, content)
                self._transfer.done(done_bytes=part.size, sent_bytes=part.size)
        finally:
            connection.close()

    async def _read(self, connection: PeerConnection, part: Part) -> memoryview:
        pause = FIRST_PAUSE
        while True:
            token = self._image.token
            try:
                content = await self._attempt(connection, token, part)
            except ImageClosed:
                why = await self._open_again(token)
            except PartNotRead as error:
                why = str(error)
            else:
                self._heard = time.monotonic()
                return content
            if time.monotonic() - self._heard > PATIENCE_SECONDS:
                raise PeerFailed(
                    why,
                    advice="look at the agent of that node and the network, and repeat the command: it continues where"
                    " it stopped",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _attempt(self, connection: PeerConnection, token: str, part: Part) -> memoryview:
        late = asyncio.get_running_loop().call_later(PART_SECONDS, connection.drop)
        try:
            return await hurried(connection.abort, connection.read, token, part.number, part.offset, part.size)
        finally:
            late.cancel()

    async def _open_again(self, token: str) -> str:
        """Return why that was not possible, "" where it was. Raises PeerFailed and AgentRefused."""
        async with self._opening:
            try:
                await self._image.again(token)
            except AgentUnreachable as error:
                return str(error)
            except AgentRefused as error:
                if error.code not in FOR_NOW:
                    raise
                return str(error)
        return ""

"""An image that several places have a copy of: when one fails in the middle of an arrival, the next one continues.

A restore reads what has arrived while the rest comes, so no byte is written again, whichever copy it comes from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kybernate.node.failure import Failure
from kybernate.store.errors import first_of
from kybernate.store.movement.moving import OF_COPIES, ImageNowhere
from kybernate.store.ranges import Ranges
from kybernate.store.reader import Sink
from kybernate.store.streaming.bring import Coming, Continues
from kybernate.store.tiers.tier import Ref, Source
from kybernate.store.transfer import Transfer

QUIET_SECONDS: Final = 20.0  # without a byte, before another copy is tried: an agent is started again in less
OPEN_SECONDS: Final = 10.0  # for a copy to be opened, where another one could be: a node that is gone does not refuse


@dataclass(frozen=True)
class CopyPlace:
    """What may have a copy of an image: what it is called, and what opens the image there."""

    title: str
    open: Callable[[], Awaitable[Source]]


class Copies:
    """The copies of one image, of which one is open, and serves the bytes. It belongs to one event loop."""

    def __init__(self, ref: Ref, places: Sequence[CopyPlace]) -> None:
        self.ref, self._left = ref, list(places)
        self._reasons: list[str] = []
        self._title = ""
        self._source: Source | None = None
        self.manifest = b""  # of all copies, once one is open

    async def open(self) -> None:
        """Open the first copy that can be. Raises ImageNowhere."""
        await self._open_next()

    def coming(self) -> Coming:
        """Return what a restore is given. What its holes are is known when they come."""
        return Coming(self.ref.name, self.manifest, {}, [self._title, *(one.title for one in self._left)], self._pour)

    async def close(self) -> None:
        """Close the copy that is open; none is afterwards."""
        source, self._source = self._source, None
        if source is not None:
            await source.close()

    async def _pour(self, sink: Sink, transfer: Transfer, continues: Continues) -> None:
        """Give `sink` each byte once, from one copy after the other. Raises ImageNowhere, and what the sink raises."""
        rest, count = _Rest(sink), 1 + len(self._left)
        while True:
            try:
                await self._pour_one(rest, transfer)
                return
            except (Failure, OSError, ExceptionGroup) as error:
                first = first_of(error)
                if rest.failure is not None or not isinstance(first, OF_COPIES):
                    raise rest.failure or first from None
            self._reasons.append(f"{self._title}: {first}")
            await self.close()
            await self._open_next()
            continues(count - 1 - len(self._left))

    async def _pour_one(self, rest: _Rest, transfer: Transfer) -> None:
        """Raises TimeoutError where nothing comes for a while, and another copy could be tried."""
        assert self._source is not None, "no copy is open"
        rest.heard = time.monotonic()
        pouring = asyncio.create_task(self._source.pour(rest, transfer, rest))
        try:
            while not pouring.done():
                quiet = time.monotonic() - rest.heard
                if self._left and quiet >= QUIET_SECONDS:
                    raise TimeoutError(f"nothing has arrived for {QUIET_SECONDS:g} s")
                await asyncio.wait({pouring}, timeout=QUIET_SECONDS - quiet if self._left else None)
        finally:
            pouring.cancel()
            await asyncio.wait({pouring})
        pouring.result()

    async def _open_next(self) -> None:
        """Raises ImageNowhere, with the reason of each copy that has failed."""
        while self._left:
            place = self._left.pop(0)
            try:
                async with asyncio.timeout(OPEN_SECONDS if self._left else None) as limit:
                    source = await place.open()
            except (Failure, OSError) as error:
                reason = f"no answer within {OPEN_SECONDS:g} s" if limit.expired() else error
                self._reasons.append(f"{place.title}: {reason}")
                continue
            if self.manifest in (b"", source.manifest):
                self._title, self._source, self.manifest = place.title, source, source.manifest
                return
            await source.close()
            self._reasons.append(f"{place.title}: it has another image of that name")
        reasons = "\n".join(f"  {one}" for one in self._reasons or ["no tier has it"])
        raise ImageNowhere(f"{self.ref} cannot be read from any tier:\n{reasons}")


class _Rest:
    """Passes on to a sink what it has not been given yet. `failure` is the sink's own, which is no copy's fault."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._given, self._lock = Ranges(), Lock()
        self.heard = 0.0
        self.failure: Exception | None = None

    def has(self, file: str, offset: int, size: int) -> bool:
        return not self._missing(file, offset, size)

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for at, size in self._missing(file, offset, len(view)):
            with self._sinks_own():
                self._sink.write(file, at, view[at - offset : at - offset + size])
            self._note(file, at, size)

    def zeros(self, file: str, offset: int, size: int) -> None:
        for at, count in self._missing(file, offset, size):
            with self._sinks_own():
                self._sink.zeros(file, at, count)
            self._note(file, at, count)

    def _missing(self, file: str, offset: int, size: int) -> list[tuple[int, int]]:
        with self._lock:
            return self._given.missing(file, offset, size)

    def _note(self, file: str, offset: int, size: int) -> None:
        with self._lock:
            self._given.add(file, offset, size)
        self.heard = time.monotonic()

    @contextmanager
    def _sinks_own(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

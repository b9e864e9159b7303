"""One attempt at an operation: what it hears, and how those who carry it out learn that it is to end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from kybernate.node.stdio import TaskStreams
from kybernate.verbs.errors import OperationUndone
from kybernate.verbs.model import Operation, Report
from kybernate.verbs.node import Node
from kybernate.verbs.room import Taker
from kybernate.verbs.verb import Heard
from kybernate_shim.messages import shim_pb2 as wire

HEAR_SECONDS = 0.1  # between two reports of a thread
ROOM = "room"  # the step in which an operation waits for room on GPUs
LOOK_SECONDS = 0.1  # between two looks at whether the operation is to end

T = TypeVar("T")
Streams = Callable[[bool], TaskStreams]


class Attempt:
    """Made in the event loop's thread. `seconds` are given to the shim as its own limit, 0: as configured.

    `streams` makes the streams of a container that is restored, with or without a terminal; None: into its log. `stop`
    is set when the operation is to end, `ended` when the attempt has.
    """

    def __init__(
        self,
        operation: Operation,
        node: Node,
        heard: Heard,
        threads: Executor,
        *,
        seconds: float = 0,
        streams: Streams | None = None,
    ) -> None:
        self.operation, self.node, self.seconds, self.streams = operation, node, seconds, streams
        self.stop = threading.Event()
        self.ended = asyncio.Event()
        self._heard = heard
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    def check(self) -> None:
        """Raises OperationUndone where the operation is to end."""
        if self.stop.is_set():
            raise OperationUndone(f"the {self.operation.verb} was cancelled and left nothing behind")

    def status(self, status: wire.Container) -> None:
        """Report what a shim says of the container."""
        if status.step:
            self._heard(Report(status.step, status.done_bytes, status.total_bytes))

    def step(self, name: str) -> None:
        """Report that a step begins; from any thread."""
        self.check()
        self._loop.call_soon_threadsafe(self._heard, Report(name))

    def counted(self, step: str) -> Callable[[int, int], None]:
        """Return what reports the bytes of a step, from any thread. It raises OperationUndone, as `check` does."""

        def count(done: int, total: int) -> None:
            self.check()
            now = time.monotonic()
            if now - self._last >= HEAR_SECONDS:
                self._last = now
                self._loop.call_soon_threadsafe(self._heard, Report(step, done, total))

        return count

    async def until_stopped(self, work: Awaitable[T]) -> T:
        """Do it, and cancel it where the operation is to end. Raises OperationUndone."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                self.check()
            return task.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread; when the agent ends in between, the work is stopped at its next report."""
        try:
            return await self._loop.run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            self.stop.set()
            raise

    @asynccontextmanager
    async def room(self, taker: Taker) -> AsyncIterator[None]:
        """Hold room on the node's GPUs while the block takes it. Raises OperationUndone, and what the owner refuses.

        As long as it waits, the operation is at the step "room".
        """
        async with AsyncExitStack() as leaving:
            taken = self.node.room.taken(taker, self._waits)
            await self.until_stopped(taken.__aenter__())
            leaving.push_async_exit(taken)
            yield

    def _waits(self, reason: str) -> None:
        self._heard(Report(ROOM, note=reason))

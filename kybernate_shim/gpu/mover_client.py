"""The shim's side of the process that moves VRAM bytes: starts it, asks it, and turns its failures into errors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

from kybernate_shim.linux.children import Child
from kybernate_shim.vram_io.errors import DataPathRefused
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.worker_protocol.client import PendingJob, WorkerClient
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Encoded, Job
from kybernate_shim.worker_protocol.mover_jobs import DROPPING, ERRORS, PROGRAM
from kybernate_shim.worker_protocol.programs import command

WORDS_BYTES = 16 << 10
CANCEL_SECONDS = 10.0  # a cancelled transfer ends within a piece, unless a disk does not answer

R = TypeVar("R")


class Spawner(Protocol):
    """Starts programs; linux.children.Children does."""

    def spawn(
        self, argv: list[str], *, env: Mapping[str, str] | None = None, fds: Mapping[int, int] | None = None
    ) -> Child: ...


class VramMover:
    """A running worker. It does one job at a time; callers wait for their turn."""

    def __init__(self, child: Child, words: int) -> None:
        self._child = child
        self._words = words  # a file in memory with what it has written to stderr
        self._client: WorkerClient
        self._turn = asyncio.Lock()

    async def connect(self, connection: socket.socket) -> None:
        streams = await asyncio.open_connection(sock=connection)
        self._client = WorkerClient(*streams, "the process that moves VRAM bytes", ERRORS, self._epitaph)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(
        self,
        job: Job[R],
        *,
        on_progress: Callable[[int], None] = lambda done: None,
        on_drop: Callable[[int, SavedRegion], None] = lambda pid, part: None,
    ) -> R:
        """Do a job and return its result; `on_progress` receives the bytes done by a job that moves bytes.

        `on_drop` receives the process and the part whose pages are about to be dropped, even if the worker is killed
        then.
        Raises a VramError; when cancelled, the job has ended before this returns.
        """

        def on_event(event: Encoded) -> None:
            dropping = self._client.read(DROPPING, event)
            on_drop(dropping.pid, dropping.part)

        async with self._turn:
            call = self._client.begin(job, on_progress=on_progress, on_event=on_event)
            try:
                return await call.result()
            except WorkerError as error:
                raise DataPathRefused(str(error)) from error
            except asyncio.CancelledError:
                await self._cancel(call)
                raise
            finally:
                self._client.forget(call)

    async def _cancel(self, call: PendingJob[R]) -> None:
        """End a job. Its answer is most likely that it was cancelled; otherwise the caller's undo finds out."""
        with suppress(WorkerError):
            call.cancel()
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await call.ended()
        except TimeoutError:
            self._child.kill()
            await call.ended()

    async def _epitaph(self) -> str:
        await asyncio.wait({self._child.exited}, timeout=1)
        status = f"with status {self._child.exited.result().status}" if self._child.exited.done() else "its connection"
        lines = os.pread(self._words, WORDS_BYTES, 0).decode(errors="replace").splitlines()
        return f"has ended {status}" + (f": {' / '.join(lines[-3:])}" if lines else "")

    async def close(self) -> None:
        self._client.close()
        await self._child.end()
        os.close(self._words)


@asynccontextmanager
async def vram_mover(children: Spawner) -> AsyncIterator[VramMover]:
    """Run a worker as long as the context lasts. Raises DataPathRefused where it cannot be started."""
    ours, theirs = socket.socketpair()
    words = os.memfd_create("vram-worker")
    with theirs:
        try:
            child = children.spawn(command(PROGRAM, "3"), fds={2: words, 3: theirs.fileno()})
        except OSError as error:
            ours.close()
            os.close(words)
            raise DataPathRefused(f"the process that moves VRAM bytes cannot be started: {error}") from error
    worker = VramMover(child, words)
    await worker.connect(ours)
    try:
        yield worker
    finally:
        await worker.close()

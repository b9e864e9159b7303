"""The shim's side of the process that moves VRAM bytes: starts it, asks it, and turns its failures into errors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from kybernate_shim.cuda.vram import errors
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.cuda.vram.saved import SavedRegion
from kybernate_shim.linux.children import Child

MODULE = "kybernate_shim.cuda.vram.worker"
WORDS_BYTES = 16 << 10
CANCEL_SECONDS = 10.0  # a cancelled transfer ends within a piece, unless a disk does not answer


class WorkerLost(VramError):
    """The process that moves the bytes has ended; what it was doing may have been done or not."""


class Spawner(Protocol):
    """Starts programs; linux.children.Children does."""

    def spawn(
        self, argv: list[str], *, env: Mapping[str, str] | None = None, fds: Mapping[int, int] | None = None
    ) -> Child: ...


class VramWorker:
    """A running worker. It does one job at a time; callers wait for their turn."""

    def __init__(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: int) -> None:
        self._child = child
        self._words = words  # a file in memory with what it has written to stderr
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(
        self,
        do: str,
        *,
        on_progress: Callable[[int], None] | None = None,
        on_drop: Callable[[int, SavedRegion], None] | None = None,
        **job: Any,
    ) -> Any:
        """Do a job and return its result; `on_progress` is told the bytes done, of a job that moves some.

        `on_drop` is told the process and the part of which the pages are about to be dropped, also of a worker that
        is killed then.
        Raises a VramError; when cancelled, the job has ended before this returns.
        """
        async with self._turn:
            try:
                self._writer.write(json.dumps({"do": do, **job}).encode() + b"\n")
                return await self._answer(on_progress, on_drop)
            except asyncio.CancelledError:
                await self._cancel(on_drop)
                raise

    async def _answer(
        self,
        on_progress: Callable[[int], None] | None = None,
        on_drop: Callable[[int, SavedRegion], None] | None = None,
    ) -> Any:
        while True:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                line = b""
            if not line.endswith(b"\n"):
                raise WorkerLost(f"the process that moves VRAM bytes has ended {await self._epitaph()}")
            message = json.loads(line)
            if "dropping" in message:
                if on_drop is not None:
                    on_drop(message["dropping"], SavedRegion(**message["part"]))
            elif "progress" not in message:
                break
            elif on_progress is not None:
                on_progress(message["progress"])
        if "failed" in message:
            raise _error(message["failed"], message["text"])
        return message["done"]

    async def _epitaph(self) -> str:
        await asyncio.wait({self._child.exited}, timeout=1)
        ended = f"with status {self._child.exited.result().status}" if self._child.exited.done() else "its connection"
        lines = os.pread(self._words, WORDS_BYTES, 0).decode(errors="replace").splitlines()
        return f"{ended}: {' / '.join(lines[-3:])}" if lines else ended

    async def _cancel(self, on_drop: Callable[[int, SavedRegion], None] | None) -> None:
        self._writer.write(b'{"do": "cancel"}\n')
        # What it says is that it was cancelled, most likely; else the caller, who undoes, finds out.
        with suppress(VramError):
            try:
                async with asyncio.timeout(CANCEL_SECONDS):
                    await self._answer(on_drop=on_drop)
            except TimeoutError:
                self._child.kill()
                await self._answer(on_drop=on_drop)

    async def close(self) -> None:
        self._writer.close()
        await self._child.end()
        os.close(self._words)


@asynccontextmanager
async def vram_worker(children: Spawner) -> AsyncIterator[VramWorker]:
    """Run a worker as long as the context lasts. Raises WorkerLost where it cannot be started."""
    ours, theirs = socket.socketpair()
    words = os.memfd_create("vram-worker")
    with theirs:
        try:
            child = children.spawn([sys.executable, "-m", MODULE, "3"], fds={2: words, 3: theirs.fileno()})
        except OSError as error:
            ours.close()
            os.close(words)
            raise WorkerLost(f"the process that moves VRAM bytes cannot be started: {error}") from error
    reader, writer = await asyncio.open_connection(sock=ours)
    worker = VramWorker(child, reader, writer, words)
    try:
        yield worker
    finally:
        await worker.close()


def _error(name: str, text: str) -> VramError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, VramError):
        return kind(text)
    return VramError(text)

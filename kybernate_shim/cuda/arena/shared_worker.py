"""The helper's one worker that holds the arena: its contexts and pinned memory are dear, so all jobs share it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kybernate_shim.cuda.workers import Worker, WorkerDied


class SharedWorker:
    """Starts the worker for its first job, and another one after it has died; several jobs may run at once."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._worker: Worker | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._worker is not None and self._worker.alive

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    async def call(self, verb: str, pid: int, *arguments: Any, seconds: float) -> dict[str, Any]:
        """Do `verb` to `pid`, of which there is one such job at a time, and return the answer.

        Raises WorkerDied, which a job that takes longer than `seconds` comes to as well, and DriverUnavailable.
        """
        worker = await self._ready()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[verb, pid] = answer
        try:
            worker.send({"verb": verb, "pids": [pid], "arguments": arguments})
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            await worker.kill()
            raise WorkerDied(f"the arena's worker had no answer to {verb} after {seconds:g} s and was ended") from None
        finally:
            self._waiting.pop((verb, pid), None)

    async def close(self) -> None:
        """End the worker: its contexts are gone from the cards, what is in the arena stays."""
        if self._reading is not None:
            self._reading.cancel()
        if self._worker is not None:
            await self._worker.kill()
        self._worker = self._reading = None

    async def _ready(self) -> Worker:
        async with self._starting:
            if not self.running:
                await self.close()
                self._worker = await Worker.start(*self._arguments)
                self._reading = asyncio.create_task(self._read(self._worker))
            assert self._worker is not None
            return self._worker

    async def _read(self, worker: Worker) -> None:
        """Hand out the answers until the worker dies, and that to those who still wait."""
        try:
            while True:
                answer = await worker.read()
                waiting = self._waiting.get((answer["verb"], answer["pid"]))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except WorkerDied as error:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(WorkerDied(str(error)))

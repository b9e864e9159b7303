"""The helper's one worker that holds the arena: its contexts and pinned memory are dear, so all jobs share it.

A job has its own thread in the worker and its own deadline there, by which it ends by itself, whatever its process
does (see `jobs`). Only a job that does not even do that, because the kernel or the driver holds its thread, makes the
worker be replaced; it is ended then when its other jobs have ended, or, where it answers nothing any more, immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kybernate_shim.cuda.workers import Worker, WorkerDied

REACT_SECONDS = 10.0  # that a job whose time is over has left to end; it undoes what it has begun meanwhile
PING_SECONDS = 5.0
PING = "ping", 0

Waiting = dict[tuple[str, int], asyncio.Future[dict[str, Any]]]


class Shift:
    """One worker process, with the jobs that it has."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._waiting: Waiting = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def busy(self) -> bool:
        return any(key != PING for key in self._waiting)

    async def do(self, verb: str, pid: int, arguments: Sequence[Any], *, seconds: float) -> dict[str, Any]:
        """Do a job and return the answer. Raises WorkerDied, and TimeoutError: then the job is stuck."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[verb, pid] = answer
        try:
            self.worker.send({"verb": verb, "pids": [pid], "arguments": [seconds, *arguments]})
            async with asyncio.timeout(seconds + REACT_SECONDS):
                return await answer
        finally:
            if self._waiting.get((verb, pid)) is answer:
                del self._waiting[verb, pid]

    async def answers(self) -> bool:
        """Tell whether the worker still reads its jobs."""
        answer = self._waiting[PING] = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError, WorkerDied, OSError):
            self.worker.send({"verb": PING[0], "pids": []})
            async with asyncio.timeout(PING_SECONDS):
                await answer
                return True
        return False

    async def close(self) -> None:
        """End the worker; jobs that it still has raise WorkerDied."""
        self._reading.cancel()
        await self.worker.kill()
        self._fail("the arena's worker was ended, because it answered nothing any more")

    async def _read(self) -> None:
        """Hand out the answers until the worker dies, and that to those who still wait."""
        try:
            while True:
                answer = await self.worker.read()
                waiting = self._waiting.get((answer["verb"], answer["pid"]))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except WorkerDied as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerDied(why))


class SharedWorker:
    """Starts the worker for its first job, and another one after it has died; several jobs may run at once."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._shift: Shift | None = None
        self._leaving: set[Shift] = set()  # with a job that is stuck, and others that are not
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._shift is not None and self._shift.worker.alive

    @property
    def busy(self) -> bool:
        return self._shift is not None and self._shift.busy

    async def call(self, verb: str, pid: int, *arguments: Any, seconds: float) -> dict[str, Any]:
        """Do `verb` to `pid`, of which there is one such job at a time, and return the answer.

        The job has `seconds`, which are told to the worker before `arguments`, and ends itself by then. Raises
        WorkerDied, also where it does not, and DriverUnavailable.
        """
        shift = await self._ready()
        try:
            return await shift.do(verb, pid, arguments, seconds=seconds)
        except TimeoutError:
            now = await self._replace(shift)
            raise WorkerDied(
                f"the arena's worker had no answer to {verb} {REACT_SECONDS:g} s after its {seconds:g} s were over, and"
                f" {now}"
            ) from None
        finally:
            if shift in self._leaving and not shift.busy:
                self._leaving.discard(shift)
                await shift.close()

    async def close(self) -> None:
        """End the worker: its contexts are gone from the cards, what is in the arena stays."""
        ended, self._shift = [*self._leaving, *([self._shift] if self._shift else [])], None
        self._leaving.clear()
        for shift in ended:
            await shift.close()

    async def _replace(self, shift: Shift) -> str:
        """Give no further job to a worker that has a stuck one, and end it as soon as no other job needs it."""
        if self._shift is shift:
            self._shift = None
        if shift.busy and await shift.answers():
            self._leaving.add(shift)
            return "is ended when its jobs for other processes have ended"
        await shift.close()
        return "was ended"

    async def _ready(self) -> Shift:
        async with self._starting:
            if self._shift is not None and not self.running:
                await self._shift.close()
                self._shift = None
            if self._shift is None:
                self._shift = Shift(await Worker.start(*self._arguments))
            return self._shift

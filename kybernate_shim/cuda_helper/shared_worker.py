"""The helper's one worker that holds the arena: its contexts and pinned memory are expensive, so all jobs share it.

A job has its own thread in the worker and its own deadline there, at which it ends by itself, whatever its process
does. Only when a job does not end then, because the kernel or the driver holds its thread, is the worker replaced. The
old one is ended when its other jobs have ended, or immediately where it does not answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kybernate_shim.cuda_helper.workers import Worker
from kybernate_shim.worker_protocol.client import OnEvent
from kybernate_shim.worker_protocol.cuda_jobs import ArenaJob, MoveAnswer, Ping
from kybernate_shim.worker_protocol.errors import WorkerError

REACT_SECONDS = 10.0  # that a job whose time is over has left to end; it undoes what it has begun meanwhile
PING_SECONDS = 5.0


class SharedWorker:
    """Starts the worker for its first job, and another one after it has died; several jobs may run concurrently."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._worker: Worker | None = None
        self._leaving: set[Worker] = set()  # with a job that is stuck, and others that are not
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._worker is not None and self._worker.alive

    @property
    def busy(self) -> bool:
        return self._worker is not None and self._worker.busy

    async def do(self, job: ArenaJob, on_event: OnEvent = lambda event: None) -> MoveAnswer:
        """Do a job, which ends by itself when its seconds are over.

        Raises a WorkerError, also where it does not end then.
        """
        worker = await self._ready()
        try:
            return await worker.do(job, seconds=job.seconds + REACT_SECONDS, on_event=on_event)
        except TimeoutError:
            now = await self._replace(worker)
            raise WorkerError(
                f"the arena's worker had not answered {job.verb} {REACT_SECONDS:g} s after its deadline of"
                f" {job.seconds:g} s, and {now}"
            ) from None
        finally:
            if worker in self._leaving and not worker.busy:
                self._leaving.discard(worker)
                await worker.kill()

    async def close(self) -> None:
        """End the worker: its contexts are gone from the GPUs, what is in the arena stays."""
        ended, self._worker = [*self._leaving, *([self._worker] if self._worker else [])], None
        self._leaving.clear()
        for worker in ended:
            await worker.kill()

    async def _replace(self, worker: Worker) -> str:
        """Give no further job to a worker that has a stuck one, and end it as soon as no other job needs it."""
        if self._worker is worker:
            self._worker = None
        if worker.busy and await _answers(worker):
            self._leaving.add(worker)
            return "is ended when its jobs for other processes have ended"
        await worker.kill()
        return "was ended"

    async def _ready(self) -> Worker:
        async with self._starting:
            if self._worker is not None and not self.running:
                await self._worker.kill()
                self._worker = None
            if self._worker is None:
                self._worker = await Worker.start(*self._arguments)
            return self._worker


async def _answers(worker: Worker) -> bool:
    """Return whether a worker still reads its jobs."""
    try:
        await worker.do(Ping(), seconds=PING_SECONDS)
    except (TimeoutError, WorkerError):
        return False
    return True

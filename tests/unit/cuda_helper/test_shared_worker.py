"""The arena's one worker and its many jobs: what one of them does is no other's harm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kybernate_shim.cuda_helper import shared_worker
from kybernate_shim.cuda_helper.shared_worker import SharedWorker
from kybernate_shim.cuda_helper.workers import Worker
from kybernate_shim.worker_protocol.cuda_jobs import ArenaJob, MoveAnswer, Offload, Ping, Settle
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Job

STUCK, FINE = 17, 18  # pids


class Process:
    """Stands in for a worker process: answers no job for STUCK, those for FINE when `go` is set."""

    def __init__(self, *, deaf: bool) -> None:
        self.alive, self.deaf = True, deaf
        self.go = asyncio.Event()
        self.killed = asyncio.Event()
        self.jobs: list[Job[Any]] = []
        self._going: list[ArenaJob] = []

    @property
    def busy(self) -> bool:
        return bool(self._going)

    async def do(self, job: Job[Any], *, seconds: float, on_event: object = None) -> Any:
        self.jobs.append(job)
        if isinstance(job, Ping) and not self.deaf:
            return None
        if isinstance(job, ArenaJob):
            self._going.append(job)
        try:
            async with asyncio.timeout(seconds):
                await self._done(job)
        finally:
            if isinstance(job, ArenaJob):
                self._going.remove(job)
        return MoveAnswer()

    async def _done(self, job: Job[Any]) -> None:
        killed = asyncio.ensure_future(self.killed.wait())
        gone = asyncio.ensure_future(self.go.wait()) if isinstance(job, ArenaJob) and job.pid == FINE else killed
        try:
            await asyncio.wait({killed, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.killed.is_set():
                raise WorkerError("killed")
        finally:
            killed.cancel()
            gone.cancel()

    async def kill(self) -> None:
        self.alive = False
        self.killed.set()


Story = Callable[[SharedWorker, list[Process]], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a story with a SharedWorker and the processes that it has started."""

    def run(story: Story, *, deaf: bool = False) -> None:
        started: list[Process] = []

        async def start(*arguments: str) -> Worker:
            started.append(Process(deaf=deaf))
            return cast("Worker", started[-1])

        async def main() -> None:
            for name in ("REACT_SECONDS", "PING_SECONDS"):
                monkeypatch.setattr(shared_worker, name, 0.01)
            monkeypatch.setattr(Worker, "start", start)
            shared = SharedWorker(["arena"])
            await story(shared, started)
            await shared.close()
            assert not any(process.alive for process in started)

        asyncio.run(main())

    return run


async def begun(shared: SharedWorker, pid: int) -> asyncio.Future[MoveAnswer]:
    job = asyncio.ensure_future(shared.do(Offload(pid, 0.01 if pid == STUCK else 60)))
    await asyncio.sleep(0)
    return job


def test_job_that_is_stuck_leaves_the_others_their_worker(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        fine = await begun(shared, FINE)
        with pytest.raises(WorkerError, match="is ended when its jobs for other processes have ended"):
            await shared.do(Offload(STUCK, 0))
        (first,) = started
        assert first.alive
        later = await begun(shared, FINE)  # which has another one
        await asyncio.sleep(0)
        _, second = started
        first.go.set()
        assert (await fine).refusal is None
        assert not first.alive
        assert second.alive
        second.go.set()
        assert (await later).refusal is None
        assert second.alive

    tell(story)


def test_worker_that_is_stuck_as_a_whole_is_ended(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        fine = await begun(shared, FINE)
        with pytest.raises(WorkerError, match=r"after its deadline of .* s, and was ended"):
            await shared.do(Offload(STUCK, 0))
        with pytest.raises(WorkerError):
            await fine
        assert [process.alive for process in started] == [False]

    tell(story, deaf=True)


def test_worker_with_nothing_but_a_stuck_job_is_ended_without_a_question(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        with pytest.raises(WorkerError, match="was ended"):
            await shared.do(Offload(STUCK, 0))
        assert [job.verb for job in started[0].jobs] == ["offload"]

    tell(story)


def test_job_is_told_how_long_it_may_take(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        job = asyncio.ensure_future(shared.do(Settle(FINE, 7)))
        await asyncio.sleep(0)
        started[0].go.set()
        await job
        assert started[0].jobs == [Settle(FINE, 7, True, ())]

    tell(story)

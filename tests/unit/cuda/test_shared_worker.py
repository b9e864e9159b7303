"""The arena's one worker and its many jobs: what one of them does is no other's harm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kybernate_shim.cuda.arena import shared_worker
from kybernate_shim.cuda.arena.shared_worker import SharedWorker
from kybernate_shim.cuda.workers import Worker, WorkerDied

STUCK, FINE = 17, 18  # pids


class Process:
    """Stands in for a worker process: answers no job for STUCK, those for FINE when `go` is set."""

    def __init__(self, *, deaf: bool) -> None:
        self.alive, self.deaf = True, deaf
        self.go = asyncio.Event()
        self.jobs: list[dict[str, Any]] = []
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._answering: set[asyncio.Task[None]] = set()

    def send(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)
        if job["verb"] == "ping" and not self.deaf:
            self._answers.put_nowait({"verb": "ping", "pid": 0})
        if job["pids"] == [FINE]:
            self._answering.add(asyncio.ensure_future(self._answer(job)))

    async def _answer(self, job: dict[str, Any]) -> None:
        await self.go.wait()
        self._answers.put_nowait({"verb": job["verb"], "pid": FINE, "code": 0})

    async def read(self) -> dict[str, Any]:
        answer = await self._answers.get()
        if answer is None:
            raise WorkerDied("killed")
        return answer

    async def kill(self) -> None:
        self.alive = False
        self._answers.put_nowait(None)


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


async def begun(shared: SharedWorker, pid: int) -> asyncio.Future[dict[str, Any]]:
    job = asyncio.ensure_future(shared.call("take", pid, seconds=0.01 if pid == STUCK else 60))
    await asyncio.sleep(0)
    return job


def test_job_that_is_stuck_leaves_the_others_their_worker(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        fine = await begun(shared, FINE)
        with pytest.raises(WorkerDied, match="is ended when its jobs for other processes have ended"):
            await shared.call("take", STUCK, seconds=0)
        (first,) = started
        assert first.alive
        later = await begun(shared, FINE)  # which has another one
        await asyncio.sleep(0)
        _, second = started
        first.go.set()
        assert (await fine)["code"] == 0
        assert not first.alive
        assert second.alive
        second.go.set()
        assert (await later)["code"] == 0
        assert second.alive

    tell(story)


def test_worker_that_is_stuck_as_a_whole_is_ended(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        fine = await begun(shared, FINE)
        with pytest.raises(WorkerDied, match=r"s were over, and was ended"):
            await shared.call("take", STUCK, seconds=0)
        with pytest.raises(WorkerDied):
            await fine
        assert [process.alive for process in started] == [False]

    tell(story, deaf=True)


def test_worker_with_nothing_but_a_stuck_job_is_ended_without_a_question(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        with pytest.raises(WorkerDied, match="was ended"):
            await shared.call("take", STUCK, seconds=0)
        assert [job["verb"] for job in started[0].jobs] == ["take"]

    tell(story)


def test_job_is_told_how_long_it_may_take(tell: Callable[..., None]) -> None:
    async def story(shared: SharedWorker, started: list[Process]) -> None:
        job = asyncio.ensure_future(shared.call("settle", FINE, True, [], seconds=7))
        await asyncio.sleep(0)
        started[0].go.set()
        await job
        assert started[0].jobs[0]["arguments"] == [7, True, []]

    tell(story)

"""The pool of workers: which are started, kept warm and ended, and that a spare is no burden on the first job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kybernate_shim.cuda_helper import workers
from kybernate_shim.cuda_helper.workers import KEPT_WARM, Lifetime, Worker, Workers
from kybernate_shim.worker_protocol.errors import WorkerError


class FakeWorker:
    """A worker that lives until it is killed."""

    def __init__(self) -> None:
        self.alive = True

    async def kill(self) -> None:
        self.alive = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The workers that were started, in order."""
    found: list[FakeWorker] = []

    async def start(**_: object) -> FakeWorker:
        found.append(FakeWorker())
        return found[-1]

    monkeypatch.setattr(Worker, "start", start)
    return found


@pytest.fixture
def pool(tmp_path: Path) -> Workers:
    return Workers(Lifetime(tmp_path / "lifetime"))


async def settled() -> None:
    """Let all tasks come to where they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_spare_does_not_start_with_the_job_that_needs_a_worker(pool: Workers, started: list[FakeWorker]) -> None:
    async def main() -> None:
        await pool.release(await pool.acquire())
        await settled()
        assert len(started) == 1
        assert await pool.acquire() is started[0]
        await pool.close()

    asyncio.run(main())
    assert len(started) == 1


def test_spare_comes_later(pool: Workers, started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SPARE_SECONDS", 0)

    async def main() -> None:
        first = await pool.acquire()
        await settled()
        assert len(started) == KEPT_WARM
        assert await pool.acquire() is started[1] is not first
        await pool.close()

    asyncio.run(main())


def test_no_more_than_the_warm_ones_are_kept(
    pool: Workers, started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SPARE_SECONDS", 0)

    async def main() -> None:
        taken = [await pool.acquire() for _ in range(KEPT_WARM + 1)]
        for worker in taken:
            await pool.release(worker)
        await settled()
        assert [worker.alive for worker in started].count(True) == KEPT_WARM
        await pool.close()
        assert not any(worker.alive for worker in started)

    asyncio.run(main())


def test_spare_that_cannot_start_is_the_next_callers_affair(
    pool: Workers, started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SPARE_SECONDS", 0)

    async def main() -> None:
        await pool.acquire()

        async def refuse(**_: object) -> FakeWorker:
            raise WorkerError("no driver")

        monkeypatch.setattr(Worker, "start", refuse)
        await settled()
        with pytest.raises(WorkerError, match="no driver"):
            await pool.acquire()

    asyncio.run(main())

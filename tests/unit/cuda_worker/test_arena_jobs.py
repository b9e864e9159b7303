"""Time that a job has: it ends by its deadline, with a little left for leaving its process in order."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kybernate_shim.arena.control import ControlUnusable
from kybernate_shim.cuda_worker.deadline import ANSWER_SECONDS, UNDO_SECONDS, JobDeadline
from kybernate_shim.linux.own_thread import in_own_thread


def test_job_ends_by_its_deadline_and_can_still_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job = JobDeadline(30)
    assert job.left() == job.undo_left() == ANSWER_SECONDS
    now += 29
    assert (job.left(), job.undo_left()) == (1, 1 + UNDO_SECONDS)
    now += 1
    with pytest.raises(ControlUnusable, match="abandoned the process after 30 s"):
        job.check()
    assert job.undo_left() == UNDO_SECONDS
    now += 60
    assert job.undo_left() == 0


def test_call_apart_returns_and_raises_as_it_does() -> None:
    async def main() -> None:
        assert await in_own_thread(lambda: 7, 60) == 7
        with pytest.raises(ZeroDivisionError):
            await in_own_thread(lambda: 1 // 0, 60)

    asyncio.run(main())


def test_call_that_comes_too_late_is_undone() -> None:
    go, undone = threading.Event(), threading.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await in_own_thread(lambda: go.wait(60), 0.001, late=undone.set)
        assert not undone.is_set()
        go.set()
        await asyncio.to_thread(undone.wait, 60)

    asyncio.run(main())
    assert undone.is_set()


def test_failure_that_comes_too_late_needs_no_undoing() -> None:
    go, over, undone = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        go.wait(60)
        over.set()
        raise OSError

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await in_own_thread(fail, 0.001, late=undone.set)
        go.set()
        await asyncio.to_thread(over.wait, 60)

    asyncio.run(main())
    assert not undone.is_set()

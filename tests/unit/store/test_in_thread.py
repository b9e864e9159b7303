"""A thread has ended when its caller resumes: nothing is written to what has been given up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kybernate.store.in_thread import hurried, in_thread


async def _begun(task: asyncio.Task[None], begun: threading.Event) -> None:
    assert await asyncio.to_thread(begun.wait, 10)
    assert not task.done()


@pytest.mark.parametrize("times", [1, 3])
def test_cancellation_waits_for_the_thread(times: int) -> None:
    begun, release, wrote = threading.Event(), threading.Event(), list[float]()

    def write() -> None:
        begun.set()
        assert release.wait(10)
        wrote.append(time.monotonic())

    async def cancelled() -> None:
        task = asyncio.create_task(in_thread(write))
        await _begun(task, begun)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wrote

    asyncio.run(cancelled())


def test_cancellation_hurries_the_thread() -> None:
    begun, release = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        assert release.wait(10)
        raise ConnectionAbortedError

    async def cancelled() -> None:
        task = asyncio.create_task(hurried(release.set, read))
        await _begun(task, begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_errors_and_results_pass() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 7, 0))

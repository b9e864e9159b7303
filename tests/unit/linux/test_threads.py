"""A thread is never left behind, however often its caller is cancelled, unless it waits for a tenant."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from kybernate_shim.linux import threads
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end


@pytest.mark.parametrize("cancels", [1, 3])
def test_cancelled_caller_waits_for_the_thread(cancels: int) -> None:
    working, go_on = threading.Event(), threading.Event()
    stopped, lost = [], []

    def work() -> None:
        working.set()
        assert go_on.wait(10)
        raise OSError("stopped")  # of no interest any more

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
        task = asyncio.ensure_future(to_the_end(work, lambda: stopped.append(True)))
        await asyncio.to_thread(working.wait, 10)
        for _ in range(cancels):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        await asyncio.wait({task})
        assert task.cancelled()
        del task
        gc.collect()

    asyncio.run(story())
    assert (stopped, lost) == ([True], [])


def test_thread_in_a_call_that_does_not_return_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.01)
    reading, writing = os.pipe()
    working, stopped, done, closed = threading.Event(), [], [], threading.Event()

    def work() -> None:
        try:
            working.set()
            os.read(reading, 1)  # as a filesystem that does not answer
            done.append("what must not happen any more")
        finally:
            closed.set()

    async def story() -> None:
        task = asyncio.ensure_future(as_long_as_wanted(work, lambda: stopped.append(True)))
        await asyncio.to_thread(working.wait, 10)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()
        assert not closed.is_set()

    asyncio.run(story())
    os.write(writing, b"x")
    assert closed.wait(10)
    for fd in (reading, writing):
        os.close(fd)
    assert (stopped, done) == ([True], [])


def test_work_that_ends_early_is_waited_for() -> None:
    stop = threading.Event()
    ended: list[bool] = []

    async def story() -> None:
        task = asyncio.ensure_future(as_long_as_wanted(lambda: ended.append(stop.wait(10)), stop.set))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert ended == [True]

    asyncio.run(story())


def test_result_and_error_of_work_are_the_callers() -> None:
    assert asyncio.run(as_long_as_wanted(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(as_long_as_wanted(lambda: 1 // 0))

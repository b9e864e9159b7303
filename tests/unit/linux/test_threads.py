"""A thread is never left behind, however often its caller is cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from kybernate_shim.linux.threads import to_the_end


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

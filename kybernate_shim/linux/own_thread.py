"""Calls that read a tenant's process, which may block them: each runs in its own thread.

A read of /proc/PID/maps waits for a lock of the process, and a thread that is to be stopped may be blocked in the
kernel. The event loop, and the few threads that asyncio shares among all, must not wait for one process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T], seconds: float, *, late: Callable[[], object] = lambda: None) -> T:
    """Run `call` in a thread that nothing else waits for, and return its result. Raises TimeoutError after `seconds`.

    The thread is left behind then, and if its call succeeds after all, `late` undoes it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    deciding, given_up = threading.Lock(), False

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is one without an error

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
            failure = error
        with deciding:
            if not given_up:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(settle, result, failure)
                return
        if failure is None:
            late()

    threading.Thread(target=work, name="apart", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(done)
    except BaseException:
        with deciding:
            given_up = True
        done.add_done_callback(lambda ended: _undo(ended, late))  # the result may have been set just before
        raise


def _undo(ended: asyncio.Future[T], late: Callable[[], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        threading.Thread(target=late, name="apart", daemon=True).start()

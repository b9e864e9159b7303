"""Blocking work outside the event loop, for steps that have an undo.

A thread cannot be stopped. Work on the node's own files ends by itself, and a caller that is cancelled waits for it.
Work that looks at a tenant's files or processes may be blocked in a system call for as long as the tenant likes: a
filesystem in user space that does not answer, one whose server is in the frozen container itself, a page of a process
that comes from such a filesystem. It has a thread of its own, which a caller that is cancelled leaves behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 5.0  # after a cancel; work that can end early checks much more often


class LeftBehind(BaseException):
    """Raised in a thread that was left behind, as soon as its system call returns: it does nothing more."""


async def to_the_end(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run `work` in a thread and return what it returns; a cancelled caller waits for it before it continues.

    Were the thread left behind, it would freeze the container after the undo has thawed it, or
    write into a directory that has just been cleared. `stop` is called then, for work that can end early.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        while not task.done():
            with suppress(asyncio.CancelledError):  # a second one: the thread still cannot be left behind
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # of no interest: the cancel came first
        raise


async def as_long_as_wanted(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run `work`, which a tenant may block in a call, in a thread, and return its result.

    A cancelled caller calls `stop`, for work that can end early, and waits PATIENCE_SECONDS at most. A thread that is
    left behind after that executes nothing more of `work` but what closes its files.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is one without an error

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except LeftBehind:
            return
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=run, name="apart", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError as error:
        stop()
        until = loop.time() + PATIENCE_SECONDS
        while not done.done() and loop.time() < until:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({done}, timeout=until - loop.time())
        if done.done():
            done.exception()  # of no interest: the cancel came first
        else:
            done.cancel()
            _leave_behind(thread)
            error.add_note("it was blocked in a call that a filesystem or a process of the container does not answer")
        raise


def _leave_behind(thread: threading.Thread) -> None:
    import ctypes  # here, as in libc.py

    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(LeftBehind))


@asynccontextmanager
async def entered(place: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context whose entry and exit block, without blocking the event loop."""
    made = asyncio.ensure_future(asyncio.to_thread(place.__enter__))
    try:
        yield await asyncio.shield(made)
    finally:
        await asyncio.wait({made})  # a caller that is cancelled meanwhile leaves none behind
        if made.exception() is None:
            await to_the_end(lambda: place.__exit__(None, None, None))

"""Blocking work outside the event loop, for steps that have an undo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run `work` in a thread and return what it returns; a cancelled caller waits for it before it continues.

    A thread cannot be stopped. Were it left behind, it would freeze the container after the undo has thawed it, or
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


@asynccontextmanager
async def entered(place: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context whose ends block, without making the event loop wait for them."""
    made = asyncio.ensure_future(asyncio.to_thread(place.__enter__))
    try:
        yield await asyncio.shield(made)
    finally:
        await asyncio.wait({made})  # a caller that is cancelled meanwhile leaves none behind
        if made.exception() is None:
            await to_the_end(lambda: place.__exit__(None, None, None))

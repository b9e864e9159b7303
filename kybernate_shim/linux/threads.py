"""Blocking work beside the event loop, for steps that have an undo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run `work` in a thread and return what it returns; a cancelled caller waits for it before it goes on.

    A thread cannot be stopped. Were it left behind, it would freeze the container after the undo has thawed it, or
    write into a directory that has just been cleared. `stop` is called then, for work that can end early.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({task})
        raise

"""Work in threads that has ended when its caller resumes, also where the caller is cancelled.

A thread cannot be cancelled. If it outlived its caller, it would write to descriptors that are another file's by then,
or into a directory that is being removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `function` returns in a thread."""
    return await hurried(lambda: None, function, *arguments, **named)


async def hurried(hurry: Callable[[], object], function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `function` returns in a thread. A cancellation calls `hurry`, which lets it end early."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hurry()
        await _ended(task)
        raise


async def _ended(task: asyncio.Future[T]) -> None:
    """Wait for the end, through further cancellations: the first one is raised afterwards."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()  # the cancellation counts

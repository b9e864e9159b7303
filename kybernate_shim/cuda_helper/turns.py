"""Which call may change a process now: one after the other, from whichever client.

A shim runs one operation on a container at a time. But a call outlives the shim that made it, if that shim is killed,
and the next client of the process would then interfere with a call that still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary


class Turns:
    """The turns at all processes of a node, by pid."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def at(self, pids: Iterable[int]) -> AsyncIterator[None]:
        """Wait until no other call changes one of the processes, and keep others waiting."""
        locks = [self._locks.setdefault(pid, asyncio.Lock()) for pid in sorted(set(pids))]  # in one order for all
        async with AsyncExitStack() as stack:
            for lock in locks:
                await stack.enter_async_context(lock)
            yield

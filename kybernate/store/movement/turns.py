"""Whose bytes go first: transfers of a lower priority pause between two requests while a higher one moves bytes.

A transfer that pauses keeps what it has; nothing is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kybernate.store.policy.model import Priority
from kybernate.store.transfer import Transfer, TransferProgress


class Turns:
    """The transfers of one node. It belongs to one event loop."""

    def __init__(self) -> None:
        self._active: Counter[Priority] = Counter()
        self._changed = asyncio.Event()

    @contextmanager
    def transfer(
        self,
        priority: Priority,
        *,
        parallel: int = 4,
        level: int | None = 3,
        bytes_per_second: float = 0.0,
        report: Callable[[TransferProgress], object] = lambda progress: None,
    ) -> Iterator[Transfer]:
        """Give a transfer that takes its turn among those of the others while the block runs."""
        self._active[priority] += 1
        try:
            yield _InTurn(self, priority, parallel, level, bytes_per_second, report)
        finally:
            self._active[priority] -= 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(self, priority: Priority) -> None:
        """Wait until no transfer of a higher priority moves bytes."""
        while any(count for other, count in self._active.items() if other < priority):
            await self._changed.wait()


class _InTurn(Transfer):
    def __init__(
        self,
        turns: Turns,
        priority: Priority,
        parallel: int,
        level: int | None,
        bytes_per_second: float,
        report: Callable[[TransferProgress], object],
    ) -> None:
        super().__init__(parallel, level, bytes_per_second, report)
        self._turns, self._priority = turns, priority

    async def pace(self, count: int) -> None:
        await self._turns.wait(self._priority)
        await super().pace(count)

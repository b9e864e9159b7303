"""Those who follow one operation: each gets every state, and of the progress in between the newest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from kybernate.verbs.model import Operation


class Watcher:
    """Holds one entry for each state that its reader has not seen; a slow reader costs no more memory than that."""

    def __init__(self) -> None:
        self._waiting: deque[Operation] = deque()
        self._news = asyncio.Event()

    def put(self, operation: Operation) -> None:
        if self._waiting and operation.revision < self._waiting[-1].revision:
            return
        if self._waiting and self._waiting[-1].state == operation.state:
            self._waiting.pop()
        self._waiting.append(operation)
        self._news.set()

    async def read(self) -> AsyncIterator[Operation]:
        """Yield the operation with each change, until a final state has been yielded."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                operation = self._waiting.popleft()
                yield operation
                if operation.final:
                    return


class Watchers:
    """All watchers by the operations' ids."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[Watcher]] = {}

    @contextmanager
    def follow(self, id: str) -> Iterator[Watcher]:
        watcher = Watcher()
        self._watchers.setdefault(id, set()).add(watcher)
        try:
            yield watcher
        finally:
            remaining = self._watchers[id]
            remaining.discard(watcher)
            if not remaining:
                del self._watchers[id]

    def put(self, operation: Operation) -> None:
        for watcher in self._watchers.get(operation.id, ()):
            watcher.put(operation)

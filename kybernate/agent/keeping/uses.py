"""When workloads were used: restored or resumed. A forecast needs weeks of it, also of workloads without an image."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any, Final

from kybernate.agent.journal import Journal
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS use (owner TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (owner, time)) WITHOUT ROWID",
)
USES: Final = frozenset({"restore", "resume"})  # verbs
KEPT_SECONDS: Final = 60 * 86400.0
MOST: Final = 2000  # of one workload: older ones say no more about its habits


class Uses:
    """Kept in the agent's journal. `owner` is NAMESPACE/WORKLOAD; `owner_of` returns that of an operation, "" for none.

    It may block, and is asked in a thread.
    """

    def __init__(self, journal: Journal, owner_of: Callable[[wire.Operation], str], log: Any) -> None:
        self._journal, self._owner_of, self._log = journal, owner_of, log
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, operation: wire.Operation) -> None:
        """Note the use that an operation was."""
        if operation.verb in USES and operation.state == wire.SUCCEEDED:
            task = asyncio.get_running_loop().create_task(self._note(operation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _note(self, operation: wire.Operation) -> None:
        try:
            if owner := await asyncio.to_thread(self._owner_of, operation):
                await self.add(owner, operation.ended.ToNanoseconds() / 1e9)
        except Failure as error:
            self._log.warning("use.not_noted", operation=operation.id, error=str(error))

    async def add(self, owner: str, time: float) -> None:
        """Note a use, and forget those that are too old. Raises JournalUnusable."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO use VALUES (?, ?)", (owner, time))
            connection.execute("DELETE FROM use WHERE time < ?", (time - KEPT_SECONDS,))
            connection.execute(
                "DELETE FROM use WHERE owner = ? AND time < (SELECT min(time) FROM"
                " (SELECT time FROM use WHERE owner = ? ORDER BY time DESC LIMIT ?))",
                (owner, owner, MOST),
            )

        await self._journal.run(work)

    async def all(self) -> dict[str, tuple[float, ...]]:
        """Return the times of all uses by workload, in order. Raises JournalUnusable."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, float]]:
            rows = connection.execute("SELECT owner, time FROM use ORDER BY owner, time")
            return [(owner, time) for owner, time in rows]

        found: dict[str, list[float]] = {}
        for owner, time in await self._journal.run(work):
            found.setdefault(owner, []).append(time)
        return {owner: tuple(times) for owner, times in found.items()}

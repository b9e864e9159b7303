"""The agent's journal: one SQLite database that survives the agent's end at any moment, and the node's.

A transaction that has ended is on the disk (WAL with synchronous=FULL). Modules that keep something in it own their
tables, and pass the statements that create them. All access is from worker threads, one at a time.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kybernate.node.failure import Failure

BUSY_SECONDS = 10.0

Result = TypeVar("Result")


class JournalUnusable(Failure):
    """The journal cannot be opened or written. No operation begins without it."""

    advice = "look at the disk that holds it (space, permissions), then start the agent again"


class Journal:
    """An open journal. `schema` holds the statements of all its tables, each with IF NOT EXISTS."""

    def __init__(self, path: Path, schema: Sequence[str]) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "journal")  # its own: the loop's may all be at work for minutes
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            for statement in schema:
                self._connection.execute(statement)
        except sqlite3.Error as error:
            raise JournalUnusable(f"the journal {path} cannot be opened: {error}") from error

    def close(self) -> None:
        self._thread.shutdown()
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the journal for one transaction; it is on the disk when the block ends, or nothing of it is."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise JournalUnusable(f"the journal {self.path} cannot be written: {error}") from error

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run `work` in a transaction of its own, in a thread, and return its result."""

        def inside() -> Result:
            with self.transaction() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, inside)

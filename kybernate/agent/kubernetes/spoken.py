"""How far the events of pods have come, in the journal: a restart continues where the last run stopped."""

from __future__ import annotations

import sqlite3

from kybernate.agent.journal import Journal

SCHEMA = ("CREATE TABLE IF NOT EXISTS spoken (only INTEGER PRIMARY KEY CHECK (only = 1), event INTEGER NOT NULL)",)


class Spoken:
    """The id of the last event before which the API server has all; the journal's schema must have SCHEMA."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def begin(self, last: int) -> int:
        """Return it; a node that is new in its cluster begins after event `last`."""

        def work(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR IGNORE INTO spoken VALUES (1, ?)", (last,))
            return int(connection.execute("SELECT event FROM spoken").fetchone()[0])

        return await self._journal.run(work)

    async def advance(self, event: int) -> None:
        """Note that all up to `event` is done."""
        await self._journal.run(lambda it: it.execute("UPDATE spoken SET event = ?", (event,)))

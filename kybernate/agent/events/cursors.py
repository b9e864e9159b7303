"""How far each hook has come, in the journal: a restart continues where it stopped."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Collection

from kybernate.agent.journal import Journal

SCHEMA = ("CREATE TABLE IF NOT EXISTS hooks (name TEXT PRIMARY KEY, delivered INTEGER NOT NULL)",)


class Cursors:
    """The id of the last event that each URL has got, or that was given up for it. URLs may be secrets: only their
    digests are kept."""

    def __init__(self, journal: Journal) -> None:
        """The journal's schema must have SCHEMA."""
        self._journal = journal

    async def begin(self, url: str, last: int) -> int:
        """Return a URL's cursor; a new one begins after event `last`."""

        def work(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR IGNORE INTO hooks VALUES (?, ?)", (_name(url), last))
            query = "SELECT delivered FROM hooks WHERE name = ?"
            return int(connection.execute(query, (_name(url),)).fetchone()[0])

        return await self._journal.run(work)

    async def advance(self, url: str, delivered: int) -> None:
        """Note that everything up to event `delivered` is done for a URL."""
        values = (delivered, _name(url))
        await self._journal.run(lambda it: it.execute("UPDATE hooks SET delivered = ? WHERE name = ?", values))

    async def keep(self, urls: Collection[str]) -> None:
        """Forget all others."""
        names = [_name(url) for url in urls]
        marks = ",".join("?" * len(names))
        await self._journal.run(lambda it: it.execute(f"DELETE FROM hooks WHERE name NOT IN ({marks})", names))


def _name(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()

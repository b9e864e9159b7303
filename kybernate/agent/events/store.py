"""Events in the journal. Their ids are given without gaps, over restarts of the agent, too.

They are kept for a day, and where they are too many, each container, and the node itself, has its share: those that
have fewer keep all, and of the others the oldest go. No storm of events pushes out those of another tenant.

Each run begins with an event of its own, which the revisions of the hub build on (`watch/revisions.py`).
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kybernate.agent.journal import Journal
from kybernate.messages import agent_pb2 as api

SCHEMA = (
    # AUTOINCREMENT: the id of a pruned event is never given again.
    "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, time_ns INTEGER NOT NULL, "
    "body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS events_by_time ON events (time_ns)",
)
KEEP_SECONDS = 24 * 3600.0
MOST_EVENTS = 200_000  # in the journal, whatever their age
PRUNE_SECONDS = 600.0
PRUNE_AFTER = MOST_EVENTS // 10  # events that were recorded since
PAGE = 256


class EventStore:
    """The table of events."""

    def __init__(
        self, journal: Journal, *, keep_seconds: float = KEEP_SECONDS, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Record that the agent has started. The journal's schema must have SCHEMA."""
        self.keep_seconds = keep_seconds
        self._journal = journal
        self._now_ns = now_ns
        self._pruned_ns = 0
        self._recorded = 0  # since then
        self.started = api.Event(type="agent.started", level="info", message="the agent has started")
        self.started.time.FromNanoseconds(now_ns())
        with journal.transaction() as connection:
            self.started.id = _insert(connection, self.started)

    @property
    def began(self) -> int:
        """The id of the event that this run of the agent has begun with."""
        return self.started.id

    async def append(self, events: Sequence[api.Event]) -> None:
        """Write events, all or none, and give them their ids. Raises JournalUnusable."""

        def work(connection: sqlite3.Connection) -> list[int]:
            self._recorded += len(events)
            self._prune(connection)
            return [_insert(connection, event) for event in events]

        for event, id in zip(events, await self._journal.run(work), strict=True):
            event.id = id

    async def between(self, after: int, until: int) -> list[api.Event]:
        """Return the oldest events with `after` < id <= `until`, at most PAGE of them."""
        if after >= until:
            return []

        def work(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            query = "SELECT id, body FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
            return connection.execute(query, (after, until, PAGE)).fetchall()

        return [_event(row) for row in await self._journal.run(work)]

    async def has(self, is_it: Callable[[api.Event], bool], since_ns: int) -> bool:
        """Return whether there is such an event, no older than `since_ns` since 1970."""

        def work(connection: sqlite3.Connection) -> bool:
            rows = connection.execute("SELECT id, body FROM events WHERE time_ns >= ?", (since_ns,))
            return any(is_it(_event(row)) for row in rows)

        return await self._journal.run(work)

    async def last(self) -> int:
        """Return the id of the newest event."""
        query = "SELECT seq FROM sqlite_sequence WHERE name = 'events'"
        return await self._journal.run(lambda connection: int(connection.execute(query).fetchone()[0]))

    def _prune(self, connection: sqlite3.Connection) -> None:
        now = self._now_ns()
        if 0 <= now - self._pruned_ns < PRUNE_SECONDS * 1e9 and self._recorded < PRUNE_AFTER:
            return
        self._pruned_ns, self._recorded = now, 0
        connection.execute("DELETE FROM events WHERE time_ns < ?", (now - int(self.keep_seconds * 1e9),))
        if int(connection.execute("SELECT COUNT(*) FROM events").fetchone()[0]) <= MOST_EVENTS:
            return
        kept: dict[str, list[int]] = defaultdict(list)  # by container, "" for the node's own
        for row in connection.execute("SELECT id, body FROM events ORDER BY id DESC"):
            kept[api.Event.FromString(row["body"]).container].append(row["id"])
        share = share_of({name: len(ids) for name, ids in kept.items()}, MOST_EVENTS)
        over = [(id,) for ids in kept.values() for id in ids[share:]]
        connection.executemany("DELETE FROM events WHERE id = ?", over)


def share_of(counts: Mapping[str, int], most: int) -> int:
    """Return how many each may keep, so that all together keep `most` at the most."""
    left, holders = most, len(counts)
    for count in sorted(counts.values()):
        if count * holders > left:
            return left // holders
        left, holders = left - count, holders - 1
    return max(counts.values(), default=0)


def _insert(connection: sqlite3.Connection, event: api.Event) -> int:
    """Write one event, without its id, which the journal gives it."""
    values = (event.time.ToNanoseconds(), event.SerializeToString())
    return int(connection.execute("INSERT INTO events (time_ns, body) VALUES (?, ?)", values).lastrowid or 0)


def _event(row: sqlite3.Row) -> api.Event:
    event = api.Event.FromString(row["body"])
    event.id = row["id"]
    return event

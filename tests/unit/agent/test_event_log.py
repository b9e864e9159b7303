"""Events: recorded in order, without gaps, over restarts, before they are delivered."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.events import store as stores
from kybernate.agent.events.log import EventLog
from kybernate.agent.events.store import PAGE, SCHEMA, EventStore, share_of
from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.messages import agent_pb2 as api

HOUR_NS = 3600 * 10**9


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.db", SCHEMA)


def log_of(store: EventStore, sink: list[api.Event], clock: Clock) -> EventLog:
    return EventLog(store, [sink.append], structlog.get_logger(), now_ns=clock)


def test_ids_rise_without_gaps_over_restarts(journal: Journal) -> None:
    async def run() -> list[int]:
        store = EventStore(journal)
        log = EventLog(store, [], structlog.get_logger())
        return [store.began, *[(await log.record("a.happened", "info", "x")).id for _ in range(3)]]

    assert [*asyncio.run(run()), *asyncio.run(run())] == list(range(1, 9))


def test_event_that_cannot_be_written_takes_no_id_and_is_not_delivered(journal: Journal) -> None:
    async def run() -> None:
        delivered: list[api.Event] = []
        log = log_of(EventStore(journal), delivered, Clock())
        with journal.transaction() as connection:
            connection.execute(
                "CREATE TEMP TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
        with pytest.raises(JournalUnusable, match="disk is full"):
            await log.record("a.lost", "info", "x")
        with journal.transaction() as connection:
            connection.execute("DROP TRIGGER full")
        assert (await log.record("a.kept", "info", "x")).id == 2
        assert [event.type for event in delivered] == ["a.kept"]

    asyncio.run(run())


def test_events_are_delivered_in_the_order_of_their_ids_and_written_together(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        delivered: list[api.Event] = []
        store = EventStore(journal)
        writes: list[int] = []
        append = store.append

        async def counted(events: list[api.Event]) -> None:
            writes.append(len(events))
            await append(events)

        monkeypatch.setattr(store, "append", counted)
        log = log_of(store, delivered, Clock())
        await asyncio.gather(*(log.record("a.happened", "info", str(n)) for n in range(100)))
        assert [event.id for event in delivered] == list(range(2, 102))
        assert [event.message for event in delivered] == [str(n) for n in range(100)]
        assert sum(writes) == 100
        assert len(writes) < 10

    asyncio.run(run())


def test_cancelled_caller_does_not_take_the_event_back(journal: Journal) -> None:
    async def run() -> None:
        delivered: list[api.Event] = []
        log = log_of(EventStore(journal), delivered, Clock())
        task = asyncio.create_task(log.record("a.happened", "info", "x"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await log.close()
        assert [event.id for event in delivered] == [2]

    asyncio.run(run())


def test_old_events_are_pruned_and_their_ids_never_given_again(journal: Journal) -> None:
    async def run() -> None:
        clock = Clock()
        store = EventStore(journal, now_ns=clock)
        log = log_of(store, [], clock)
        await log.record("a.happened", "info", "old")
        clock.now_ns += 25 * HOUR_NS
        await log.record("a.happened", "info", "new")
        assert [event.id for event in await log.since(0)] == [3]
        with journal.transaction() as connection:
            connection.execute("DELETE FROM events")
        assert (await log.record("a.happened", "info", "next")).id == 4

    asyncio.run(run())


def test_number_of_events_is_limited(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_EVENTS", 5)

    async def run() -> None:
        clock = Clock()
        log = log_of(EventStore(journal, now_ns=clock), [], clock)
        for _ in range(10):
            clock.now_ns += HOUR_NS // 2
            await log.record("a.happened", "info", "x")
        assert [event.id for event in await log.since(0)] == [6, 7, 8, 9, 10, 11]

    asyncio.run(run())


def test_storm_of_one_container_leaves_the_events_of_others(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_EVENTS", 12)
    monkeypatch.setattr(stores, "PRUNE_AFTER", 4)

    async def run() -> None:
        clock = Clock()
        log = log_of(EventStore(journal, now_ns=clock), [], clock)
        for name in ("quiet", "quiet", "other", *["loud"] * 40):
            await log.record("a.happened", "info", "x", container=name)
        found = [event.container for event in await log.since(0)]
        assert [found.count(name) for name in ("", "quiet", "other")] == [1, 2, 1]
        assert len(found) <= 12 + 4

    asyncio.run(run())


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), max_size=8), st.integers(0, 100))
def test_shares_are_equal_and_use_the_room(counts: dict[str, int], most: int) -> None:
    share = share_of(counts, most)
    kept = sum(min(count, share) for count in counts.values())
    assert kept <= most or kept == 0
    assert share >= max(counts.values(), default=0) or kept + len(counts) > most


def test_since_returns_all_pages_with_all_fields(journal: Journal) -> None:
    async def run() -> None:
        log = EventLog(EventStore(journal), [], structlog.get_logger())
        about = {"container": "c", "namespace": "n", "operation": "o", "image": "i"}
        events = await asyncio.gather(
            *(log.record("a.happened", "warning", "x", **about, bytes=n) for n in range(PAGE + 1))
        )
        found = await log.since(1)
        assert found == events
        assert (found[-1].container, found[-1].fields["bytes"]) == ("c", str(PAGE))

    asyncio.run(run())


def test_journal_that_was_killed_keeps_what_was_recorded(tmp_path: Path) -> None:
    """The file is copied while it is open, as a power loss leaves it: what `record` returned is in it."""

    async def run() -> None:
        path = tmp_path / "journal.db"
        log = EventLog(EventStore(Journal(path, SCHEMA)), [], structlog.get_logger())
        await log.record("a.happened", "info", "x")
        for file in tmp_path.glob("journal.db*"):
            (tmp_path / file.name.replace("journal", "copy")).write_bytes(file.read_bytes())

    asyncio.run(run())
    with sqlite3.connect(tmp_path / "copy.db") as connection:
        assert connection.execute("SELECT max(id) FROM events").fetchone() == (2,)

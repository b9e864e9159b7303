"""The hub: whatever a client misses, it ends with the hub's state, and sees every event once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kybernate.agent.events.store import SCHEMA, EventStore
from kybernate.agent.journal import Journal
from kybernate.agent.watch.hub import ENTRY_BYTES, KINDS, ChangeLog, Entry, Hub, identity
from kybernate.messages import agent_pb2 as api
from kybernate.node.failure import Invalid

IDS = ("a", "b", "c")


class MemoryHistory:
    """Events in memory, delivered two at a time."""

    def __init__(self) -> None:
        self.events: list[api.Event] = []
        self.began = 0
        self.start()

    def start(self) -> None:
        self.began = self.write("agent.started").id

    def write(self, type: str) -> api.Event:
        event = api.Event(id=len(self.events) + 1, type=type)
        self.events.append(event)
        return event

    async def between(self, after: int, until: int) -> list[api.Event]:
        await asyncio.sleep(0)
        return [event for event in self.events if after < event.id <= until][:2]


class Client:
    """A client as it should be: keeps the last revision and instance, and applies what it gets."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.revision = 0
        self.instance = ""
        self.objects: dict[tuple[str, str], Any] = {}
        self.events: list[int] = []
        self.fresh: dict[tuple[str, str], Any] | None = None
        self.stream: AsyncGenerator[api.Change, None] | None = None

    def apply(self, change: api.Change) -> None:
        assert change.revision >= self.revision or change.instance != self.instance or self.fresh is not None
        self.revision, self.instance = change.revision, change.instance
        if change.bookmark == api.BOOKMARK_SNAPSHOT_BEGIN:
            self.fresh = {}
        elif change.bookmark == api.BOOKMARK_SNAPSHOT_END:
            assert self.fresh is not None
            self.objects, self.fresh = self.fresh, None
        else:
            self._apply_object(getattr(change, change.WhichOneof("object") or ""), change.removed)

    def _apply_object(self, message: Any, removed: bool) -> None:
        kind, key = identity(message)
        assert kind in self.kinds
        objects = self.objects if self.fresh is None else self.fresh
        if kind == "event":
            self.events.append(message.id)
        elif removed:
            objects.pop((kind, key), None)
        else:
            objects[kind, key] = message


class Watching(RuleBasedStateMachine):
    """One hub with a tiny log, restarted now and then; clients that connect, read a little and break off."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.numbers = count()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(filtered=st.sets(st.sampled_from(KINDS), min_size=1))
    def begin(self, filtered: set[str]) -> None:
        self.history = MemoryHistory()
        self.clients = [Client(KINDS), Client(KINDS), Client(tuple(filtered))]
        self.hub = Hub(self.history, most_entries=4)
        self.highest = self.hub.revision

    @rule(id=st.sampled_from(IDS), state=st.sampled_from([api.Container.RUNNING, api.Container.PAUSED]))
    def put_container(self, id: str, state: api.Container.State) -> None:
        self.hub.put(api.Container(id=id, state=state))

    @rule(id=st.sampled_from(IDS))
    def put_tier(self, id: str) -> None:
        self.hub.put(api.Tier(name=id, images=next(self.numbers)))

    @rule(id=st.sampled_from(IDS))
    def remove_container(self, id: str) -> None:
        self.hub.remove(api.Container(id=id))

    @rule()
    def record(self) -> None:
        self.hub.put(self.history.write("a.happened"))

    @rule(written=st.integers(0, 2))
    def restart(self, written: int) -> None:
        """The agent dies; events that were written last are not delivered yet, and all objects are found again."""
        for client in self.clients:
            self.break_off(client)
        for _ in range(written):
            self.history.write("a.undelivered")
        self.history.start()
        before, self.hub = self.hub, Hub(self.history, most_entries=4)
        assert self.hub.revision > before.revision
        for kind in ("container", "tier"):
            for message in before.objects(kind):
                self.hub.put(message)

    @rule(number=st.integers(0, 2), changes=st.integers(1, 8))
    def read(self, number: int, changes: int) -> None:
        self.run(self._read(self.clients[number], changes))

    @rule(number=st.integers(0, 2))
    def disconnect(self, number: int) -> None:
        self.break_off(self.clients[number])

    def break_off(self, client: Client) -> None:
        if client.stream is not None:
            self.run(client.stream.aclose())
            client.stream, client.fresh = None, None

    async def _read(self, client: Client, changes: int) -> bool:
        """Read so many changes; return False where there are no more for now."""
        if client.stream is None:
            client.stream = self.hub.subscribe(client.revision, client.instance, client.kinds)
        for _ in range(changes):
            pending = asyncio.ensure_future(anext(client.stream))
            for _ in range(8):  # the history needs a few turns of the loop
                await asyncio.sleep(0)
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})
                client.stream, client.fresh = None, None  # a cancelled generator has ended
                return False
            client.apply(pending.result())
        return True

    @invariant()
    def revisions_rise(self) -> None:
        if hasattr(self, "hub"):
            assert self.hub.revision >= self.highest
            self.highest = self.hub.revision

    @precondition(lambda self: hasattr(self, "hub"))
    @rule()
    def all_clients_end_with_the_state_of_the_hub(self) -> None:
        for client in self.clients:
            while self.run(self._read(client, 1)):
                pass
            there = {identity(m): m for kind in ("container", "tier") for m in self.hub.objects(kind)}
            assert client.objects == {key: m for key, m in there.items() if key[0] in client.kinds}
            if "event" in client.kinds:
                assert client.events == [event.id for event in self.history.events]

    def teardown(self) -> None:
        if hasattr(self, "clients"):
            self.all_clients_end_with_the_state_of_the_hub()
            for client in self.clients:
                self.break_off(client)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


TestWatching = Watching.TestCase


async def read(hub: Hub, number: int, *given: Any) -> list[api.Change]:
    async with aclosing(hub.subscribe(*given)) as changes:
        return [await anext(changes) for _ in range(number)]


def test_equal_object_is_no_change() -> None:
    hub = Hub(MemoryHistory())
    assert hub.put(api.Container(id="a"))
    revision = hub.revision
    assert not hub.put(api.Container(id="a"))
    assert not hub.remove(api.Container(id="b"))
    assert hub.revision == revision


def test_message_may_be_changed_after_it_was_put() -> None:
    hub = Hub(MemoryHistory())
    message = api.Container(id="a", state=api.Container.RUNNING)
    hub.put(message)
    message.state = api.Container.PAUSED
    assert hub.get("container", "/a").state == api.Container.RUNNING
    assert hub.put(message)


def test_client_within_the_log_gets_the_changes_and_no_snapshot() -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory())
        hub.put(api.Container(id="a"))
        revision = hub.revision
        hub.put(api.Container(id="b"))
        hub.remove(api.Container(id="a"))
        changes = await read(hub, 2, revision, hub.instance)
        assert [(change.container.id, change.removed) for change in changes] == [("b", False), ("a", True)]

    asyncio.run(run())


@pytest.mark.parametrize("revision", [0, 1, 2**63, 2**64 - 1])
def test_foreign_revision_gets_a_snapshot(revision: int) -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory())
        hub.put(api.Container(id="a"))
        changes = await read(hub, 4, revision, "another instance")
        assert [change.bookmark for change in changes] == [1, 0, 2, 0]
        assert changes[-1].event.type == "agent.started"
        assert changes[-1].revision == hub.revision

    asyncio.run(run())


def test_reader_that_falls_out_of_the_log_gets_a_new_snapshot() -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory(), most_entries=4)
        async with aclosing(hub.subscribe(hub.revision, hub.instance)) as changes:
            hub.put(api.Tier(name="a"))
            assert (await anext(changes)).tier.name == "a"
            for number in range(10):
                hub.put(api.Tier(name="a", images=number))
            found = [await anext(changes) for _ in range(3)]
            assert [change.bookmark for change in found] == [1, 0, 2]
            assert found[1].tier.images == 9

    asyncio.run(run())


def test_close_ends_subscriptions_that_wait() -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory())

        async def follow() -> int:
            return len([change async for change in hub.subscribe(hub.revision)])

        following = asyncio.create_task(follow())
        await asyncio.sleep(0)
        assert hub.wanted("gpu")
        hub.close()
        assert await following == 0
        assert not hub.wanted("gpu")

    asyncio.run(run())


def test_kinds_limit_what_is_delivered_and_unknown_ones_are_refused() -> None:
    async def run() -> None:
        hub = Hub(MemoryHistory())
        hub.put(api.Container(id="a"))
        hub.put(api.Gpu(uuid="g"))
        changes = await read(hub, 3, 0, "", ["gpu"])
        assert changes[1].gpu.uuid == "g"
        assert changes[2].bookmark == api.BOOKMARK_SNAPSHOT_END
        with pytest.raises(Invalid, match="pod"):
            await read(hub, 1, 0, "", ["pod"])

    asyncio.run(run())


def test_log_is_bounded_by_bytes() -> None:
    log = ChangeLog(0, most_bytes=10 * ENTRY_BYTES)
    for revision in range(1, 1000):
        log.append(Entry(revision, "container", api.Container(id="x" * ENTRY_BYTES), 0))
    assert log.end - log.first <= 5
    assert log.after(998) == log.end - 1
    assert log.after(1) is None


def test_restarted_hub_over_a_journal_gives_greater_revisions(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", SCHEMA)
    first = Hub(EventStore(journal))
    for number in range(50):
        first.put(api.Tier(name="a", images=number))
    second = Hub(EventStore(journal))
    assert second.revision > first.revision
    assert second.instance != first.instance

"""Each image that an operation has written is one event, whether the agent was there to hear of it or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog

from kybernate.agent.events.log import EventLog
from kybernate.agent.events.store import SCHEMA, EventStore
from kybernate.agent.inventory import containerd_events
from kybernate.agent.inventory.containers import Containers
from kybernate.agent.inventory.notices import ENDED, STARTED
from kybernate.agent.journal import Journal
from kybernate.agent.missed import Missed
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate_shim.messages import events_pb2
from tests.unit.agent.fake_node import NAMESPACE, FakeNode
from tests.unit.agent.test_hub import MemoryHistory

IMAGE = "/images/nightly"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containerd_events, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(containerd_events, "PROBE_SECONDS", 0.001)


class Run:
    """A run of the agent, as far as it hears of images. `path` has the journal of all runs."""

    def __init__(self, path: Path, node: FakeNode) -> None:
        self.node = node
        self._journal = Journal(path / "journal.db", SCHEMA)
        log = structlog.wrap_logger(structlog.testing.CapturingLogger())
        self.store = EventStore(self._journal)
        self._log = EventLog(self.store, [], log)
        note: Any = self._log.note
        self.containers = Containers(node, Hub(MemoryHistory()), note, log, ask=node.ask)
        self.missed = Missed(self.store, self.containers, log)

    async def __aenter__(self) -> Run:
        self._tasks = [asyncio.create_task(self.containers.run()), asyncio.create_task(self.missed.run())]
        await asyncio.wait_for(self.containers.ready.wait(), 5)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._log.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._journal.close()

    async def images(self) -> list[dict[str, str]]:
        """Return the fields of all events about an image that was written, over all runs."""
        await self._log.close()
        found = await self.store.between(0, await self.store.last())
        return [dict(one.fields) for one in found if (one.type, one.image) == ("container.checkpointed", IMAGE)]

    async def has(self, number: int) -> bool:
        async with asyncio.timeout(20):
            while len(await self.images()) < number:  # noqa: ASYNC110  # the journal sets no event
                await asyncio.sleep(0.002)
        return True

    async def look(self) -> None:
        """Return when all that was said so far has been heard: a later event has been."""
        self.node.publish(ENDED, ended("/images/later"))
        async with asyncio.timeout(20):
            while not await self.store.has(lambda it: it.image == "/images/later", 0):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.002)


def ended(image: str = IMAGE) -> events_pb2.ContainerUpdate:
    labels = {"verb": "checkpoint", "outcome": "done", "image": image, "bytes": "7", "seconds": "0.500"}
    return events_pb2.ContainerUpdate(id="a", labels=labels)


def operation(began_ns: int, state: int = wire.SUCCEEDED, verb: str = "checkpoint") -> wire.Operation:
    found = wire.Operation(id="o", verb=verb, container="a", namespace=NAMESPACE, image=IMAGE)
    found.state = state  # type: ignore[assignment]
    found.result.bytes = 7
    found.started.FromNanoseconds(began_ns)
    return found


def of(run: Run, *, before: bool) -> int:
    """Return a time before the run, or one in it."""
    began = run.store.started.time.ToNanoseconds()
    return began - 10**9 if before else began + 10**12


def with_node(work: Callable[[FakeNode], Coroutine[Any, Any, None]]) -> None:
    node = FakeNode()
    node.create("a")
    node.start("a")
    asyncio.run(work(node))


def test_image_that_was_written_while_the_agent_was_away_is_an_event(tmp_path: Path) -> None:
    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            run.missed.ended(operation(of(run, before=True)))
            assert await run.has(1)
            assert await run.images() == [{"bytes": "7"}]

    with_node(work)


def test_image_of_which_the_former_run_has_heard_is_no_second_event(tmp_path: Path) -> None:
    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            began = of(run, before=True)
            node.publish(ENDED, ended())
            assert await run.has(1)
        async with Run(tmp_path, node) as run:
            run.missed.ended(operation(began))
            run.missed.ended(operation(began + 1, wire.FAILED))
            while not run.missed._queue.empty():  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.002)
            await run.look()
            assert len(await run.images()) == 1

    with_node(work)


@pytest.mark.parametrize("late", [False, True])
def test_shim_and_operation_are_one_event_in_either_order(tmp_path: Path, late: bool) -> None:
    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            said = [lambda: node.publish(ENDED, ended()), lambda: run.missed.ended(operation(of(run, before=True)))]
            for say in reversed(said) if late else said:
                say()
                assert await run.has(1)
            await run.look()
            assert len(await run.images()) == 1
            node.publish(STARTED, events_pb2.ContainerUpdate(id="a", labels={"verb": "checkpoint", "image": IMAGE}))
            node.publish(ENDED, ended())  # in the same place, once the former image was removed
            assert await run.has(2)

    with_node(work)


def test_shims_word_is_waited_for_while_events_are_followed(tmp_path: Path) -> None:
    """It says more than the operation does."""

    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            run.missed.ended(operation(of(run, before=False)))
            assert run.missed._queue.empty()
            node.publish(ENDED, ended())
            assert await run.has(1)
            assert (await run.images())[0]["seconds"] == "0.500"

    with_node(work)


@pytest.mark.parametrize("what", [operation(0, wire.FAILED), operation(0, verb="export")])
def test_other_operations_write_no_image(tmp_path: Path, what: wire.Operation) -> None:
    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            run.missed.ended(what)
            assert run.missed._queue.empty()

    with_node(work)


def test_image_that_was_written_while_containerd_was_away_is_an_event(tmp_path: Path) -> None:
    async def work(node: FakeNode) -> None:
        async with Run(tmp_path, node) as run:
            node.fall()
            while run.containers.has_followed(of(run, before=False)):  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.002)
            run.missed.ended(operation(of(run, before=False)))
            assert await run.has(1)
            node.up = True

    with_node(work)

"""The publisher: order, patience while containerd is away, bounds. The clock is asyncio's own, run by a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import structlog

from kybernate_shim.errors import Refused
from kybernate_shim.messages import event_service_pb2 as wire
from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.task import events as subject
from kybernate_shim.task.events import QUEUE_LIMIT, REFUSALS, Publisher


class Containerd:
    """Answers each delivery with the next scripted error, or takes it once the script has ended."""

    def __init__(self, *script: Exception | None) -> None:
        self.script = list(script)
        self.taken: list[wire.ForwardRequest] = []

    async def __call__(self, request: wire.ForwardRequest) -> None:
        await asyncio.sleep(0)
        answer = self.script.pop(0) if self.script else None
        if answer is not None:
            raise answer
        self.taken.append(request)

    @property
    def ids(self) -> list[str]:
        return [events.TaskStart.FromString(request.envelope.event.value).container_id for request in self.taken]


class Away(Containerd):
    """Never answers."""

    async def __call__(self, request: wire.ForwardRequest) -> None:
        await asyncio.sleep(0)
        raise ConnectionError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "FIRST_PAUSE", 0)
    monkeypatch.setattr(subject, "LONGEST_PAUSE", 0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


async def publish(publisher: Publisher, *ids: str) -> None:
    for id in ids:
        publisher.publish("/tasks/start", events.TaskStart(container_id=id))
    assert await publisher.flush(5)


def test_event_travels_with_time_namespace_topic_and_bare_type_url() -> None:
    containerd = Containerd()
    run(publish(Publisher("ns", containerd, structlog.get_logger()), "a"))
    envelope = containerd.taken[0].envelope
    assert envelope.namespace == "ns"
    assert envelope.topic == "/tasks/start"
    assert envelope.event.type_url == "containerd.events.TaskStart"
    assert envelope.timestamp.seconds > 0


def test_events_keep_their_order_while_containerd_is_away() -> None:
    containerd = Containerd(ConnectionError(), None, ConnectionError(), FileNotFoundError(), ConnectionError())
    run(publish(Publisher("ns", containerd, structlog.get_logger()), "a", "b", "c"))
    assert containerd.ids == ["a", "b", "c"]


def test_patience_outlasts_any_number_of_failures() -> None:
    containerd = Containerd(*[ConnectionError()] * 500)
    run(publish(Publisher("ns", containerd, structlog.get_logger()), "a"))
    assert containerd.ids == ["a"]


def test_refused_event_does_not_block_those_behind_it() -> None:
    containerd = Containerd(*[Refused("bad namespace")] * REFUSALS)
    with structlog.testing.capture_logs() as logs:
        run(publish(Publisher("ns", containerd, structlog.get_logger()), "a", "b"))
    assert containerd.ids == ["b"]
    assert next(line for line in logs if line["event"] == "event.dropped")["error"] == "bad namespace"


def test_full_queue_drops_the_oldest_and_says_so() -> None:
    containerd = Containerd()
    with structlog.testing.capture_logs() as logs:
        run(publish(Publisher("ns", containerd, structlog.get_logger()), *map(str, range(QUEUE_LIMIT + 2))))
    assert containerd.ids == [str(number) for number in range(2, QUEUE_LIMIT + 2)]
    assert sum(line["event"] == "event.dropped" for line in logs) == 2


def test_flush_gives_up_in_time() -> None:
    async def work() -> None:
        publisher = Publisher("ns", Away(), structlog.get_logger())
        publisher.publish("/tasks/start", events.TaskStart())
        assert not await publisher.flush(0.01)

    run(work())

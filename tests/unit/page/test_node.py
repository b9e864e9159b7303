"""An agent as the source of the page's data: what is asked of it, and what a break of the connection means."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.client import AgentUnreachable
from kybernate.messages import agent_pb2 as wire
from kybernate.page import view
from kybernate.page.node import SHOWN, NodeSource, changes_of
from kybernate.page.source import LogAbsent
from tests.fakes.agent import FakeAgent
from tests.unit.client.conftest import fake as fake  # the fixture

CONTAINER = view.Container("k8s.io/c1", "default/web/app")


@pytest.fixture
def agent(fake: FakeAgent) -> FakeAgent:
    fake.changes = [
        wire.Change(revision=7, instance="i1", gpu=wire.Gpu(uuid="GPU-0", total_bytes=9)),
        wire.Change(revision=8, instance="i1", event=wire.Event(id=1, type="agent.started")),
    ]
    return fake


def test_watch_is_resumed_where_it_broke(agent: FakeAgent) -> None:
    async def scenario() -> None:
        changes = NodeSource(str(agent.socket)).changes()
        assert [type(await anext(changes)) for _ in range(3)] == [view.Found, view.Put, view.Put]
        agent.stop()
        assert isinstance(await anext(changes), view.Lost)
        agent.start()
        while not isinstance(await anext(changes), view.Found):
            pass
        await anext(changes)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    watches = [one for one in agent.requests if isinstance(one, wire.WatchRequest)]
    assert [(one.revision, one.instance) for one in (watches[0], watches[-1])] == [(0, ""), (8, "i1")]


def test_log_is_read_by_the_agent(agent: FakeAgent) -> None:
    agent.log = [wire.LogLine(text="one"), wire.LogLine(text="two", cut=True)]

    async def scenario() -> None:
        source = NodeSource(str(agent.socket))
        assert [line async for line in source.log(CONTAINER)] == ["one", "two […]"]
        agent.refused[wire.ReadLogRequest] = (
            grpc.StatusCode.NOT_FOUND,
            wire.Error(type="Missing", message="the output is in no file"),
        )
        with pytest.raises(LogAbsent, match="in no file"):
            [line async for line in source.log(CONTAINER)]
        agent.stop()
        with pytest.raises(AgentUnreachable):
            [line async for line in source.log(CONTAINER)]

    asyncio.run(asyncio.wait_for(scenario(), 60))
    (first, _) = (one for one in agent.requests if isinstance(one, wire.ReadLogRequest))
    assert (first.name, first.namespace, first.follow) == ("c1", "k8s.io", True)


def test_seat_is_shown_with_its_container_and_what_it_waits_for() -> None:
    seat = wire.Seat(
        name="g00-s2", profile="large", group="g00", gpus=[0, 1], status="SUSPENDED", since=Timestamp(seconds=9),
        namespace="k8s.io", container="c1", container_title="default/web/app", priority=-1, need_bytes=5,
        requests=[wire.SeatRequest(cause="use")], reason="g00-s1 is busy", before=["g00-s1"],
    )  # fmt: skip
    assert SHOWN["seat"](seat) == view.Seat(
        "g00-s2", "large", "g00", (0, 1), "suspended", 9.0, "k8s.io/c1", "default/web/app", -1, need=5, waits=("use",),
        reason="g00-s1 is busy", before=("g00-s1",),
    )  # fmt: skip


def test_every_kind_of_the_agent_is_shown() -> None:
    kinds = {field.name for field in wire.Change.DESCRIPTOR.oneofs_by_name["object"].fields}
    assert kinds <= SHOWN.keys()
    for kind in kinds:
        assert SHOWN[kind](getattr(wire.Change(), kind)) is not None
    assert changes_of(wire.Change()) == ()

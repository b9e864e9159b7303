"""`kybernate.self`, against a restricted socket that answers as a test has prepared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

import kybernate.self
from kybernate.client import AgentUnreachable, NotFinished, OperationFailed
from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc


class RestrictedAgent(agent_pb2_grpc.SelfServicer):
    """Knows one container. `polls` are called, one with each GetSelf after the checkpoint has begun."""

    def __init__(self) -> None:
        self.container = wire.Container(id="c1", started=Timestamp(seconds=100))
        self.operation = wire.Operation(id="op-1", verb="checkpoint", container="c1", state=wire.PENDING)
        self.polls: list[Callable[[], None]] = []
        self.requests: list[Any] = []
        self._begun = False

    def GetSelf(self, request: Any, context: Any) -> wire.Container:  # noqa: N802  # gRPC's name, as all below
        if self._begun and self.polls:
            self.polls.pop(0)()
        return self.container

    def Checkpoint(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        self.requests.append(request)
        self._begun = True
        return self.operation

    def SuspendWhenIdle(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        self.requests.append(request)
        return self.operation

    def GetOperation(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        if request.id != self.operation.id:
            context.abort(grpc.StatusCode.NOT_FOUND, "another container's")
        return self.operation

    def becomes(self, state: wire.OperationState, **fields: Any) -> None:
        self.operation.MergeFrom(wire.Operation(state=state, **fields))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[RestrictedAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    monkeypatch.setenv("KYBERNATE_SELF", str(directory / "agent.sock"))
    monkeypatch.setattr(kybernate.self, "POLL_SECONDS", 0.01)
    servicer = RestrictedAgent()
    server = grpc.server(ThreadPoolExecutor(2))
    agent_pb2_grpc.add_SelfServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{directory}/agent.sock")
    server.start()
    yield servicer
    server.stop(None).wait(5)
    shutil.rmtree(directory)


def test_checkpoint_returns_when_the_image_is_complete(agent: RestrictedAgent) -> None:
    result = wire.Result(path="/images/team-a/web-1")
    agent.polls = [lambda: agent.becomes(wire.RUNNING), lambda: agent.becomes(wire.SUCCEEDED, result=result)]
    assert kybernate.self.checkpoint(exit=False) == kybernate.self.Saved("web-1", restored=False)
    assert not agent.polls
    assert not agent.requests[0].exit


def test_restored_process_learns_that_it_was_restored(agent: RestrictedAgent) -> None:
    def restored() -> None:
        agent.container = wire.Container(id="c2", started=Timestamp(seconds=900), restored_from="web-1")
        agent.operation = wire.Operation(id="another")

    agent.polls = [lambda: agent.becomes(wire.RUNNING), restored]
    assert kybernate.self.checkpoint(exit=True) == kybernate.self.Saved("web-1", restored=True)
    assert agent.requests[0].exit


def test_restore_under_the_same_name_is_seen(agent: RestrictedAgent) -> None:
    restored = wire.Container(id="c1", started=Timestamp(seconds=900), restored_from="web-1")
    agent.polls = [lambda: agent.container.CopyFrom(restored)]
    assert kybernate.self.checkpoint(timeout=0).restored, "also where the clock of its node has passed the limit"


def test_failed_checkpoint_is_raised(agent: RestrictedAgent) -> None:
    agent.polls = [lambda: agent.becomes(wire.FAILED, error=wire.Error(message="CRIU failed"))]
    with pytest.raises(OperationFailed, match="CRIU failed"):
        kybernate.self.checkpoint()


def test_checkpoint_that_takes_too_long_is_given_up(agent: RestrictedAgent) -> None:
    with pytest.raises(NotFinished, match="op-1"):
        kybernate.self.checkpoint(timeout=0.1)


def test_suspend_when_idle_returns_immediately(agent: RestrictedAgent) -> None:
    assert kybernate.self.suspend_when_idle(90) == "op-1"
    assert agent.requests[0].idle.seconds == 90


def test_container_without_the_socket_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KYBERNATE_SELF", str(tmp_path / "none.sock"))
    with pytest.raises(AgentUnreachable, match=r"none\.sock"):
        kybernate.self.container()

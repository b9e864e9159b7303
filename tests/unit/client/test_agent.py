"""The blocking client, against an agent that answers as a test has prepared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kybernate.client import (
    Agent,
    AgentRefused,
    AgentUnreachable,
    NotFinished,
    OperationCancelled,
    OperationFailed,
    requests,
)
from kybernate.client.contexts import Tls
from kybernate.client.target import target_of
from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent


@pytest.fixture
def agent(fake: FakeAgent) -> Iterator[Agent]:
    with Agent(str(fake.socket)) as agent:
        yield agent


def running(id: str, step: str, done: int = 0) -> wire.Operation:
    progress = wire.Progress(step=step, done_bytes=done, total_bytes=10)
    return wire.Operation(id=id, verb="checkpoint", state=wire.RUNNING, progress=progress)


def succeeded(id: str) -> wire.Operation:
    return wire.Operation(id=id, verb="checkpoint", state=wire.SUCCEEDED, result=wire.Result(path="/images/web"))


def test_checkpoint_is_followed_to_its_result(fake: FakeAgent, agent: Agent) -> None:
    fake.script = lambda id: [running(id, "dump", 4), running(id, "manifest"), succeeded(id)]
    operation = agent.checkpoint("team-a/web-0", "web", exit=True, tcp="close", deadline=30, max_freeze=1.5)
    assert [state.progress.step for state in operation.follow()] == ["", "dump", "manifest", ""]
    assert operation.result().path == "/images/web"
    (request,) = fake.requests
    assert (request.name, request.path, request.exit, request.tcp) == ("team-a/web-0", "web", True, "close")
    assert request.options.deadline.seconds == 30
    assert not request.without_rootfs
    assert request.max_freeze_seconds == 1.5


def test_same_key_is_the_same_operation(fake: FakeAgent, agent: Agent) -> None:
    assert agent.suspend("a", key="nightly").id == agent.suspend("a", key="nightly").id
    assert agent.suspend("a").id != agent.suspend("a").id


def test_failure_has_the_agents_words(fake: FakeAgent, agent: Agent) -> None:
    error = wire.Error(type="Failed", message="CRIU failed", state="the container runs", advice="see dump.log")
    fake.script = lambda id: [
        wire.Operation(id=id, verb="checkpoint", container_title="team-a/web-0", state=wire.FAILED, error=error)
    ]
    with pytest.raises(OperationFailed, match="checkpoint of team-a/web-0 failed: CRIU failed") as found:
        agent.checkpoint("web").result()
    assert (found.value.type, found.value.state, found.value.advice) == (
        "Failed",
        "the container runs",
        "see dump.log",
    )


def test_cancelled_operation_is_told_from_a_failed_one(fake: FakeAgent, agent: Agent) -> None:
    operation = agent.checkpoint("web")
    assert operation.cancel().state == wire.CANCELLED
    with pytest.raises(OperationCancelled, match="was cancelled"):
        operation.result()


def test_waiting_ends_and_the_operation_does_not(fake: FakeAgent, agent: Agent) -> None:
    operation = agent.checkpoint("web")
    with pytest.raises(NotFinished, match="op-1"):
        operation.result(timeout=0.2)
    fake.push(succeeded("op-1"))
    assert operation.result(timeout=20).path == "/images/web"


def test_operation_is_followed_over_a_restart_of_the_agent(fake: FakeAgent, agent: Agent) -> None:
    operation = agent.checkpoint("web")
    fake.push(running("op-1", "dump"))
    seen = []
    for state in operation.follow(timeout=60):
        seen.append(state.progress.step)
        if seen == ["", "dump"]:
            fake.stop()
            fake.push(succeeded("op-1"))
            threading.Thread(target=fake.start).start()
    assert operation.state.state == wire.SUCCEEDED
    assert seen[:2] == ["", "dump"]


def test_agent_that_stays_away_is_an_error(fake: FakeAgent, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = agent.checkpoint("web")
    monkeypatch.setattr(requests.Backoff, "PATIENCE", 0.2)
    fake.stop()
    with pytest.raises(AgentUnreachable, match="no agent answers on"):
        operation.result()


def test_missing_agent_is_unreachable(tmp_path: Path) -> None:
    with Agent(str(tmp_path / "none.sock")) as agent, pytest.raises(AgentUnreachable, match=r"none\.sock"):
        agent.node()


def test_refused_call_has_code_type_and_advice(fake: FakeAgent, agent: Agent) -> None:
    fake.failure = (
        grpc.StatusCode.PERMISSION_DENIED,
        wire.Error(type="NotPermitted", message="uid 1000 may not", state="nothing was done", advice="ask root"),
    )
    with pytest.raises(AgentRefused, match="uid 1000 may not") as found:
        agent.suspend("web")
    assert (found.value.code, found.value.type, found.value.state, found.value.advice) == (
        "PERMISSION_DENIED",
        "NotPermitted",
        "nothing was done",
        "ask root",
    )


def test_images_of_all_pages_are_listed(fake: FakeAgent, agent: Agent) -> None:
    fake.images = [wire.Image(id=str(number)) for number in range(5)]
    assert [image.id for image in agent.images(namespace="team-a", pinned=True)] == ["0", "1", "2", "3", "4"]
    assert {request.namespace for request in fake.requests} == {"team-a"}
    assert [image.id for image in agent.images(limit=2)] == ["0", "1"]


def test_watch_ends_with_its_timeout(fake: FakeAgent, agent: Agent) -> None:
    fake.changes = [wire.Change(revision=number, instance="i") for number in (1, 2)]
    fake.watch_ends = True
    assert [change.revision for change in agent.watch(["container"], timeout=3600)] == [1, 2]
    assert fake.requests[0].kinds == ["container"]
    (left,) = fake.watched
    assert 0 < left < 2 * 3600  # gRPC counts by the machine's clock, which may be set meanwhile


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        ("", {}, "unix:/run/kybernate/agent.sock"),
        ("", {"KYBERNATE_AGENT": "/x.sock"}, "unix:/x.sock"),
        ("unix:///y.sock", {"KYBERNATE_AGENT": "/x.sock"}, "unix:/y.sock"),
    ],
)
def test_address_is_given_or_of_the_environment(given: str, environment: dict[str, str], address: str) -> None:
    assert target_of(given, environment=environment).address == address


def test_tcp_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="node-1:7443 needs TLS"):
        target_of("node-1:7443")
    with pytest.raises(AgentUnreachable, match="cannot be read"):
        Agent("node-1:7443", tls=Tls(tmp_path / "ca", tmp_path / "crt", tmp_path / "key"))

"""The programs in the manual's page on the client, run against an agent that answers."""

from __future__ import annotations

import threading

import pytest

import kybernate.self
from kybernate.messages import agent_pb2 as wire
from tests.documentation import block
from tests.fakes.agent import FakeAgent


def test_client(fake: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", str(fake.socket))
    fake.containers = [wire.Container(title="team-a/web-0", state="running", gpu="attached")]
    dump = wire.Operation(state=wire.RUNNING, progress=wire.Progress(step="dump", done_bytes=5, total_bytes=9))
    error = wire.Error(message="no room", state="nothing was created", advice="make room")

    def states(id: str) -> list[wire.Operation]:
        if id == "op-1":
            return [dump, wire.Operation(state=wire.SUCCEEDED, result=wire.Result(path="/images/before-upgrade"))]
        return [wire.Operation(verb="restore", container="web-0-again", state=wire.FAILED, error=error)]

    fake.script = states
    exec(compile(block("docs/client.md", "client").text, "docs/client.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "team-a/web-0 running attached"
    assert "dump 5 9 0.0" in said
    assert said[-1] == "restore of web-0-again failed: no room nothing was created make room"
    restore = fake.requests[-1]
    assert (restore.image, restore.name) == ("/images/before-upgrade", "web-0-again")


def test_async_client(fake: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", str(fake.socket))
    fake.script = lambda id: [wire.Operation(state=wire.SUCCEEDED)]
    fake.changes = [wire.Change(revision=7, container=wire.Container(id="c"))]
    program = compile(block("docs/client.md", "async-client").text, "docs/client.md", "exec")
    failed: list[Exception] = []

    def run() -> None:
        try:
            exec(program, {})
        except Exception as error:  # noqa: BLE001  # the agent ends, and with it the program, which watches forever
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    said = ""
    while "7 container" not in said:
        said += capsys.readouterr().out
        thread.join(0.02)
    fake.stop()
    thread.join(30)
    assert [type(error).__name__ for error in failed] == ["AgentUnreachable"]
    assert [request.name for request in fake.requests[:2]] == ["model-a", "model-b"]


def test_self(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    saved = iter([kybernate.self.Saved("web-1", restored=False)] * 2 + [kybernate.self.Saved("web-3", restored=True)])
    idle: list[float] = []
    monkeypatch.setattr(kybernate.self, "checkpoint", lambda: next(saved))
    monkeypatch.setattr(kybernate.self, "suspend_when_idle", idle.append)
    exec(compile(block("docs/client.md", "self").text, "docs/client.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["999 web-1 False", "1999 web-1 False", "2999 web-3 True"]
    assert idle == [600]

"""The programs in the manual's page on the client, run against an agent that answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

import kybernate.self
from kybernate.messages import agent_pb2 as wire
from tests.documentation import block
from tests.fakes.agent import FakeAgent
from tests.unit.agent.access.authority import Authority


def test_client(fake: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", str(fake.socket))
    fake.containers = [wire.Container(title="team-a/web-0", state=wire.Container.RUNNING, gpu="ATTACHED")]
    dump = wire.Operation(state=wire.RUNNING, progress=wire.Progress(step="dump", done_bytes=5, total_bytes=9))
    error = wire.Error(message="no room", state="nothing was created", advice="make room")

    def states(id: str) -> list[wire.Operation]:
        if id == "op-1":
            return [dump, wire.Operation(state=wire.SUCCEEDED, result=wire.Result(path="/images/before-upgrade"))]
        return [wire.Operation(verb="restore", container="web-0-again", state=wire.FAILED, error=error)]

    fake.script = states
    exec(compile(block("docs/client.md", "client").text, "docs/client.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "team-a/web-0 RUNNING ATTACHED"
    assert "dump 5 9 0.0" in said
    assert said[-1] == "restore of web-0-again failed: no room nothing was created make room"
    restore = fake.requests[-1]
    assert (restore.image, restore.name) == ("/images/before-upgrade", "web-0-again")


def test_client_that_is_refused(
    fake: FakeAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", str(fake.socket))
    error = wire.Error(message="no container web-0", type="Missing", advice="`kybernate ps` lists them")
    fake.refused[wire.CheckpointRequest] = grpc.StatusCode.NOT_FOUND, error
    with pytest.raises(SystemExit):
        exec(compile(block("docs/client.md", "client").text, "docs/client.md", "exec"), {})
    assert capsys.readouterr().out == "Missing no container web-0 `kybernate ps` lists them\n"


def test_tls(fake: FakeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files and the port of the example are those of a test."""
    authority = Authority()
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    key, certificate = authority.issue("spiffe://example.org/admin")
    (tmp_path / "admin.key").write_bytes(key)
    (tmp_path / "admin.crt").write_bytes(certificate)
    port = fake.serve_tls(authority.issue("node-1.example.org"), authority.certificate)
    text = block("docs/client.md", "tls").text
    assert "/etc/kybernate/pki" in text
    assert "127.0.0.1:7443" in text
    text = text.replace("/etc/kybernate/pki", str(tmp_path)).replace(":7443", f":{port}")
    exec(compile(text, "docs/client.md", "exec"), {})
    assert capsys.readouterr().out == "node-1\n"


def test_library_in_a_container_needs_grpc_and_protobuf_alone() -> None:
    """An image has these two, as the manual says, and none of the node's dependencies."""
    program = (
        "import sys, kybernate.self, kybernate.client; kybernate.client.Agent; kybernate.client.AsyncAgent\n"
        "files = (getattr(one, '__file__', None) or '' for one in list(sys.modules.values()))\n"
        "print(*sorted({file.partition('/site-packages/')[2].partition('/')[0] for file in files}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if "." not in name and not name.startswith("_")}
    optional = {"grpc_health", "grpc_reflection", "grpc_tools"}  # which grpc loads where they are installed
    assert loaded - {"kybernate", "kybernate_shim"} - optional == {"google", "grpc"}


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

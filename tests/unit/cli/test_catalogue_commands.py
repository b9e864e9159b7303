"""`kybernate rm`, `label`, `version`, and the details of one operation."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate_shim import __version__
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node
from tests.unit.cli.test_agent_commands import operation


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def deleted(id: str) -> list[wire.Operation]:
    return [operation(id, wire.SUCCEEDED, verb="delete", result=wire.Result(path=f"/images/{id}"))]


def test_images_are_removed_by_the_agent(node: Node, agent: FakeAgent) -> None:
    agent.script = deleted
    assert "needs a confirmation" in node.run("rm", "one", status=4).stderr
    assert agent.requests == []
    said = node.run("rm", "one", "./two", "--yes", "--force")
    assert said.stdout.splitlines() == ["deleted /images/op-1", "deleted /images/op-2"]
    requests = [one for one in agent.requests if isinstance(one, wire.DeleteImageRequest)]
    assert [(one.image, one.force) for one in requests] == [("one", True), (str(Path("two").absolute()), True)]
    assert node.run("rm", "one", "--yes", "--no-wait").stdout == "op-3\n"
    assert node.json("rm", "one", "--yes")[0]["verb"] == "delete"


def test_copies_that_remain_are_named(node: Node, agent: FakeAgent) -> None:
    agent.script = deleted
    agent.images = [wire.Image(id="1", name="one", replicas=[wire.Replica(tier="object", place="s3://b/one")])]
    assert "a copy remains: s3://b/one" in node.run("rm", "one", "-y").stderr


def test_pinned_image_is_refused(node: Node, agent: FakeAgent) -> None:
    error = wire.Error(type="Refused", message="/images/one is pinned", state="it is as it was")
    agent.failure = (grpc.StatusCode.FAILED_PRECONDITION, error)
    assert "is pinned" in node.run("rm", "one", "--yes", status=4).stderr


def test_labels_are_set_and_removed(node: Node, agent: FakeAgent) -> None:
    assert node.run("label", "one", "team=a", "tier-", "note=x=y").stdout.startswith("labelled one: note=x=y,team=a")
    request = next(one for one in agent.requests if isinstance(one, wire.LabelImageRequest))
    assert (dict(request.labels), list(request.removed)) == ({"team": "a", "note": "x=y"}, ["tier"])
    assert node.json("label", "one", "team=a")["labels"] == {"team": "a"}


@pytest.mark.parametrize("words", ["team", "=a", "-", "team=a team-"])
def test_what_is_no_label_is_a_mistake(node: Node, agent: FakeAgent, words: str) -> None:
    node.run("label", "one", *words.split(), status=2)
    assert agent.requests == []


def test_versions_of_both_sides_are_shown(node: Node, agent: FakeAgent) -> None:
    agent.node.versions.update({"kybernate": "9.9", "containerd": "2.3", "criu": "4.2"})
    shown = dict(line.split(":", 1) for line in node.run("version").stdout.splitlines())
    assert {name: value.strip() for name, value in shown.items() if name != "shim"} == {
        "client": __version__, "agent": "9.9", "containerd": "2.3", "criu": "4.2",
    }  # fmt: skip
    document = node.json("version")
    assert (document["client"], document["agent"], document["containerd"]) == (__version__, "9.9", "2.3")


def test_version_needs_neither_agent_nor_containerd(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    node.containerd.close()
    assert node.json("version")["containerd"] == ""
    monkeypatch.setenv("KYBERNATE_AGENT", "/none.sock")
    assert "no agent answers" in node.json("version")["problem"]


def test_one_operation_is_shown_with_its_steps(node: Node, agent: FakeAgent) -> None:
    step = wire.Step(name="dump", seconds=0.5, bytes=1 << 30)
    error = wire.Error(type="DumpFailed", message="CRIU failed", state="the container runs", advice="see dump.log")
    agent.push(operation("01ab", wire.FAILED, steps=[step], error=error, requester="uid 0"))
    agent.push(operation("01cd", wire.SUCCEEDED))
    lines = node.run("ops", "01a").stdout.splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("STEP"))
    expected = {
        "operation": "01ab", "state": "failed", "requester": "uid 0", "error": "CRIU failed",
        "now": "the container runs", "advice": "see dump.log", "time": "2.00 s",
    }  # fmt: skip
    assert {name: fields[name].strip() for name in expected} == expected
    assert lines[-1].split() == ["dump", "500", "ms", "1.00", "GiB"]
    assert node.json("ops", "01ab")["id"] == "01ab"


def test_beginning_of_several_ids_is_refused_with_all_of_them(node: Node, agent: FakeAgent) -> None:
    for id in ("01ab", "01cd"):
        agent.push(operation(id, wire.SUCCEEDED))
    refused = node.run("wait", "01", status=4).stderr
    assert "'01' is the beginning of 2 operations" in refused
    assert "01ab" in refused
    assert "01cd" in refused
    assert "01cd" in node.run("wait", "01c").stdout
    assert "cancelled" in node.run("cancel", "01a").stdout
    node.run("ops", "02", status=3)


def test_container_without_operations_has_an_empty_list(node: Node, agent: FakeAgent) -> None:
    agent.containers = [wire.Container(id="c9", title="c9")]
    assert len(node.run("ops", "c9").stdout.splitlines()) == 1


def test_status_is_the_agents_where_the_shims_are_out_of_reach(
    node: Node, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    agent.push(operation("op-1", wire.RUNNING, verb="suspend", progress=wire.Progress(step="lock")))
    agent.containers = [wire.Container(namespace="k8s.io", id="c1", state="RUNNING", gpu="ATTACHED", operation="op-1")]
    assert "lock" in node.run("status", "c1").stdout
    assert node.json("status", "c1")["phase"] == "suspend"
    node.run("status", "c2", status=3)

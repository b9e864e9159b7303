"""`kybernate ops`, `wait`, `cancel`, `events` and `top`, with an agent."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def at(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(int(seconds * 1e6))
    return stamp


def operation(id: str, state: wire.OperationState, **fields: object) -> wire.Operation:
    now = time.time()
    named = {"verb": "checkpoint", "container": "c1", "container_title": "team-a/web-0/web", **fields}
    return wire.Operation(id=id, state=state, created=at(now - 90), started=at(now - 90), ended=at(now - 88), **named)  # type: ignore[arg-type]


def test_operations_are_listed_newest_first(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.SUCCEEDED, result=wire.Result(path="/images/web")))
    progress = wire.Progress(step="dump", done_bytes=1 << 30, total_bytes=2 << 30, seconds_left=3.2)
    agent.push(operation("op-2", wire.RUNNING, progress=progress))
    header, *rows = node.run("ops").stdout.splitlines()
    assert header.split() == ["OPERATION", "VERB", "CONTAINER", "STATE", "STEP", "DONE", "LEFT", "AGE"]
    assert rows[0].split() == [
        *("op-2", "checkpoint", "team-a/web-0/web", "running", "dump"),
        *("1.00", "GiB", "of", "2.00", "GiB", "3s", "1m"),
    ]
    assert rows[1].split()[:4] == ["op-1", "checkpoint", "team-a/web-0/web", "succeeded"]
    assert "/images/web" in node.run("ops", "-o", "wide").stdout


def test_states_pick_operations(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.SUCCEEDED))
    agent.push(operation("op-2", wire.FAILED))
    assert [one["id"] for one in json.loads(node.run("ops", "--state", "failed", "-o", "json").stdout)] == ["op-2"]
    assert "is not one of pending, running" in node.run("ops", "--state", "done", status=2).stderr


def test_lists_are_json_and_yaml(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.SUCCEEDED))
    (as_json,) = json.loads(node.run("ops", "-o", "json").stdout)
    (as_yaml,) = yaml.safe_load(node.run("ops", "-o", "yaml").stdout)
    assert as_json == as_yaml
    assert (as_json["state"], as_json["container_title"]) == ("succeeded", "team-a/web-0/web")


def test_wait_ends_with_the_operation(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.RUNNING))
    threading.Timer(
        0.2, agent.push, [operation("op-1", wire.SUCCEEDED, result=wire.Result(path="/images/web"))]
    ).start()
    said = node.run("wait", "op-1").stdout
    assert "succeeded" in said
    assert "/images/web" in said


def test_wait_fails_with_the_operation(node: Node, agent: FakeAgent) -> None:
    error = wire.Error(type="Failed", message="CRIU failed", state="the container runs", advice="see dump.log")
    agent.push(operation("op-1", wire.FAILED, error=error))
    assert node.run("wait", "op-1", status=1).stderr.splitlines() == [
        "kybernate: checkpoint of team-a/web-0/web failed: CRIU failed",
        "  state:  the container runs",
        "  advice: see dump.log",
    ]


def test_wait_gives_up(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.RUNNING))
    assert "operation op-1 (checkpoint) has not ended" in node.run("wait", "op-1", "--timeout", "0.2", status=5).stderr


def test_cancel_says_what_came_of_it(node: Node, agent: FakeAgent) -> None:
    agent.push(operation("op-1", wire.RUNNING))
    assert "cancelled" in node.run("cancel", "op-1").stdout


def test_without_an_agent_the_command_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    assert node.run("ops", status=6).stderr.splitlines()[0].startswith("kybernate: no agent runs on this node")


def events(*ids: int) -> list[wire.Change]:
    now = time.time()
    return [
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN),
        *(
            wire.Change(
                event=wire.Event(
                    id=id,
                    time=at(now - 3600 * (3 - id)),
                    type="container.suspended" if id % 2 else "operation.failed",
                    level="info",
                    message=f"message {id}",
                    container=f"c{id}",
                    fields={"vram_bytes": "7"},
                )
            )
            for id in ids
        ),
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END, revision=1),
    ]


def test_events_are_listed_oldest_first(node: Node, agent: FakeAgent) -> None:
    agent.changes = events(2, 1, 3)
    listed = node.run("events").stdout.splitlines()[1:]
    assert [line.split()[-1] for line in listed] == ["1", "2", "3"]
    assert [line.split()[2] for line in node.run("events", "operation.*").stdout.splitlines()[1:]] == [
        "operation.failed"
    ]
    assert [line.split()[-1] for line in node.run("events", "--since", "90m").stdout.splitlines()[1:]] == ["2", "3"]
    assert "vram_bytes=7" in node.run("events", "-o", "wide").stdout
    assert "is not a duration" in node.run("events", "--since", "soon", status=2).stderr


def test_top_prints_its_page_for_scripts(node: Node, agent: FakeAgent) -> None:
    agent.changes = [
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN),
        wire.Change(gpu=wire.Gpu(index=0, model="H200", uuid="GPU-1", total_bytes=4 << 30, used_bytes=1 << 30)),
        wire.Change(container=wire.Container(id="c1", title="team-a/web-0/web", state="RUNNING", gpu="SUSPENDED")),
        wire.Change(tier=wire.Tier(name="disk", images=3, used_bytes=1 << 30, free_bytes=1 << 30)),
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END),
    ]
    said = node.run("top", "--once").stdout
    for words in ("H200", "1.00 GiB of 4.00 GiB", "team-a/web-0/web", "suspended", "disk"):
        assert words in said


def test_events_name_containers_of_pods_shortly(node: Node, agent: FakeAgent) -> None:
    (*before, end) = events(1)
    before[-1].event.container = "a1b2c3" + 58 * "0"
    agent.changes = [*before, end]
    said = node.run("events").stdout
    assert "a1b2c3" in said
    assert 58 * "0" not in said
    assert json.loads(node.run("events", "-o", "json").stdout)[0]["container"] == "a1b2c3" + 58 * "0"


def ended(verb: str, **result: object) -> wire.Operation:
    steps = [wire.Step(name="dump", seconds=0.5, bytes=1 << 30)]
    return operation(
        "op-1",
        wire.SUCCEEDED,
        verb=verb,
        namespace="k8s.io",
        steps=steps,
        result=wire.Result(**result),  # type: ignore[arg-type]
    )


def test_checkpoint_is_the_agents_where_one_runs(node: Node, agent: FakeAgent) -> None:
    agent.script = lambda id: [ended("checkpoint", path="/images/web", bytes=3 << 30, frozen_ms=120)]
    said = node.run("checkpoint", "web-0", "web", "--exit", "--no-rootfs", "--timeout", "30").stdout
    assert "/images/web" in said
    assert "120 ms" in said
    (request,) = agent.requests
    assert (request.name, request.path, request.exit, request.without_rootfs) == ("web-0", "web", True, True)
    assert request.options.deadline.seconds == 30
    document = node.json("checkpoint", "web-0")
    assert (document["path"], document["container"], document["namespace"]) == ("/images/web", "c1", "k8s.io")
    assert document["steps"] == [{"name": "dump", "seconds": 0.5, "bytes": 1 << 30, "spared_bytes": 0}]


def test_path_of_a_checkpoint_is_that_of_the_caller(node: Node, agent: FakeAgent, tmp_path: Path) -> None:
    agent.script = lambda id: [ended("checkpoint", path=str(tmp_path / "image"))]
    node.run("checkpoint", "web-0", "./image")
    assert agent.requests[0].path == str(Path("image").absolute())


def test_operation_that_is_not_waited_for_is_named(node: Node, agent: FakeAgent) -> None:
    assert node.run("suspend", "web-0", "--no-wait").stdout == "op-1\n"
    assert node.run("checkpoint", "web-0", "--no-wait").stdout == "op-2\n"


def test_no_wait_needs_an_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    assert "--no-wait needs an agent" in node.run("resume", "web-0", "--no-wait", status=6).stderr


@pytest.mark.parametrize(("verb", "done"), [("suspend", "suspended"), ("resume", "resumed")])
def test_suspend_and_resume_are_the_agents(node: Node, agent: FakeAgent, verb: str, done: str) -> None:
    agent.script = lambda id: [ended(verb, vram_bytes=2 << 30)]
    assert node.run(verb, "web-0", "--timeout", "2").stdout.startswith(f"{done} team-a/web-0/web: 2.00 GiB of VRAM")
    request = agent.requests[0]
    assert (request.lock_timeout if verb == "suspend" else request.restore_timeout).seconds == 2


def test_swap_is_the_agents(node: Node, agent: FakeAgent) -> None:
    agent.script = lambda id: [ended("swap", vram_bytes=2 << 30)]
    assert node.run("swap", "a", "b").stdout.splitlines()[0] == "suspended team-a/web-0/web"
    assert (agent.requests[0].leaving, agent.requests[0].coming) == ("a", "b")


def test_both_sides_of_the_agents_swap_are_shown(node: Node, agent: FakeAgent) -> None:
    numbers = {"vram_bytes": 1 << 30, "left_vram_bytes": 2 << 30, "left_spared_bytes": 1 << 20}
    done = ended("swap", **numbers, arena_bytes=1 << 30, arena_reasons=["the arena is full"])
    done.steps[0].spared_bytes = 1 << 20
    done.other_container, done.other_container_title = "c2", "team-a/web-1/web"
    agent.script = lambda id: [done]
    assert node.run("swap", "a", "b").stdout.splitlines()[:3] == [
        "suspended team-a/web-0/web: 2.00 GiB of VRAM, 1.00 MiB of it unchanged or zeros",
        "resumed team-a/web-1/web: 1.00 GiB of VRAM",
        "arena: 1.00 GiB of 2.00 GiB: the arena is full",
    ]


def test_failed_verb_has_the_agents_words(node: Node, agent: FakeAgent) -> None:
    error = wire.Error(type="GpuMismatch", message="no such GPU", state="the container runs", advice="use another")
    agent.script = lambda id: [operation(id, wire.FAILED, verb="suspend", error=error)]
    assert node.run("suspend", "web-0", status=1).stderr.splitlines() == [
        "kybernate: suspend of team-a/web-0/web failed: no such GPU",
        "  state:  the container runs",
        "  advice: use another",
    ]


def test_ps_has_what_the_agent_knows(node: Node, agent: FakeAgent) -> None:
    agent.containers = [
        wire.Container(namespace="k8s.io", id="c1", title="team-a/web-0/web", pod_namespace="team-a", pod="web-0",
                       name="web", state="RUNNING", gpu="SUSPENDED", pid=7, image="web:1", operation="op-1"),
        wire.Container(namespace="k8s.io", id="c2", title="c2", state="RUNNING", problem="its shim does not answer"),
        wire.Container(namespace="k8s.io", id="s", title="team-a/web-0/(sandbox)", sandbox=True),
    ]  # fmt: skip
    agent.push(operation("op-1", wire.RUNNING, verb="resume", progress=wire.Progress(step="restore", done_bytes=5)))
    result = node.run("ps")
    _, first, second = result.stdout.splitlines()
    assert first.split() == ["c2", "c2", "unknown", "k8s.io"] or first.split()[2] == "unknown"
    assert second.split() == [
        "c1",
        "team-a/web-0/web",
        "running,",
        "suspended",
        "resume",
        "restore",
        "5",
        "B",
        "7",
        "k8s.io",
    ]
    assert "its shim does not answer" in result.stderr
    assert "web:1" in node.run("ps", "-o", "wide").stdout
    assert [one["container"] for one in yaml.safe_load(node.run("ps", "-o", "yaml").stdout)] == ["c2", "c1"]
    assert (node.json("ps")[1]["phase"], node.json("ps")[1]["gpu"]) == ("resume", "suspended")


def test_restore_in_the_background_is_the_agents(node: Node, agent: FakeAgent) -> None:
    agent.script = lambda id: [ended("restore", pid=42, source="ram")]
    said = node.run("restore", "web", "-d", "--name", "web-1", "--force", "--log", "out.log").stdout
    fields, _, steps = said.partition("\n\n")
    assert fields.split()[:6] == ["container:", "c1", "pid:", "42", "from:", "ram"]
    assert steps.split() == ["STEP", "TIME", "SIZE", "dump", "500", "ms", "1.00", "GiB"]
    (request,) = agent.requests
    assert (request.image, request.name, request.force) == ("web", "web-1", True)
    assert request.log_path == str(Path("out.log").absolute())
    answer = node.json("restore", "web", "-d")
    assert (answer["pid"], answer["source"], answer["steps"][0]["name"]) == (42, "ram", "dump")


def test_images_of_the_registry_are_filtered_by_it(node: Node, agent: FakeAgent) -> None:
    source = wire.Source(namespace="team-a", pod="web-0", container="web", workload="web")
    replica = wire.Replica(tier="disk", place="/images/team-a/one")
    agent.images = [
        wire.Image(id="1", name="one", source=source, bytes=5, replicas=[replica], labels={"keep": "yes"}, pinned=True),
        wire.Image(id="2", name="two", states=["damaged"], created=at(time.time() - 90)),
    ]
    wide = node.run("images", "-o", "wide", "--label", "keep=yes", "--workload", "web", "--pinned").stdout.splitlines()
    assert wide[1].split()[:5] == ["one", "team-a", "web-0/web", "5", "B"]
    assert "keep=yes" in wide[1]
    assert "damaged" in wide[2].split()
    request = next(one for one in agent.requests if isinstance(one, wire.ListImagesRequest))
    assert (dict(request.labels), request.workload, request.pinned) == ({"keep": "yes"}, "web", True)
    assert [one["name"] for one in json.loads(node.run("images", "tw*", "-o", "json").stdout)] == ["two"]
    assert node.run("images", "--pinned", "--quiet", "one").stdout == "/images/team-a/one\n"
    assert "is not KEY=VALUE" in node.run("images", "--label", "keep", status=2).stderr


def test_pin_says_what_was_named_and_how_else_it_is_called(node: Node, agent: FakeAgent) -> None:
    copies = [wire.Replica(name=name, place=f"/images/{name}") for name in ("m1", "m2")]
    agent.images = [wire.Image(id="3f6b", name="m2", replicas=copies)]
    assert node.run("pin", "m2").stdout == "pinned m2, which is also m1\n"
    assert node.run("unpin", "m2").stdout == "unpinned m2, which is also m1\n"
    listed = node.run("images", "m1", "-o", "table", "--pinned").stdout
    assert "m2, m1" in listed


def test_relative_path_is_the_callers_own(
    node: Node, agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    for name, told in (("./web", f"{tmp_path}/web"), ("../web", f"{tmp_path.parent}/web"), ("web", "web")):
        node.run("pin", name)
        assert agent.requests[-1].image == told

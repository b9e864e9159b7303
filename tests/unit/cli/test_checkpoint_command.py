"""`kybernate checkpoint` against a fake containerd and a fake shim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.cli.conftest import Node
from tests.unit.cli.fake_shim import FakeShim

REPLY = wire.CheckpointResponse(
    path="/images/i",
    manifest_digest="sha256:" + "0" * 64,
    bytes=3 << 20,
    frozen_ms=87,
    seconds=1.5,
    steps=[wire.Step(name="lock", seconds=0.01), wire.Step(name="dump", seconds=1.2, bytes=3 << 20)],
)


def counter(node: Node) -> FakeShim:
    node.containerd.add("counter", image="docker.io/library/busybox:1")
    shim = node.shim("counter")
    shim.add("counter", pid=os.getpid(), phase="checkpoint", step="dump", done_bytes=1, total_bytes=2)
    shim.answers["Checkpoint"] = REPLY
    return shim


def test_answer_is_shown(node: Node) -> None:
    counter(node)
    lines = node.run("checkpoint", "counter").stdout.splitlines()
    assert lines == [
        "image:     /images/i",
        "container: counter",
        "size:      3.00 MiB",
        "frozen:    87 ms",
        "time:      1.50 s",
        "",
        "STEP   TIME     SIZE",
        "lock   10 ms",
        "dump   1.20 s   3.00 MiB",
    ]


def test_answer_as_json(node: Node) -> None:
    counter(node)
    assert node.json("checkpoint", "counter") == {
        "path": "/images/i",
        "namespace": "default",
        "container": "counter",
        "manifest_digest": "sha256:" + "0" * 64,
        "bytes": 3 << 20,
        "frozen_ms": 87,
        "seconds": 1.5,
        "steps": [
            {"name": "lock", "seconds": 0.01, "bytes": 0, "spared_bytes": 0},
            {"name": "dump", "seconds": 1.2, "bytes": 3 << 20, "spared_bytes": 0},
        ],
    }


def test_flags_reach_the_shim(node: Node, tmp_path: Path) -> None:
    shim = counter(node)
    digest = node.containerd.add_image("docker.io/library/busybox:1")
    target = str(tmp_path / "image")
    node.run(
        "checkpoint", "counter", target, "--exit", "--tcp", "established", "--no-rootfs", "--timeout", "2.5", "--force",
        "--volumes=-scratch",
    )  # fmt: skip
    assert shim.requests == [
        wire.CheckpointRequest(
            id="counter",
            path=target,
            exit=True,
            tcp="established",
            timeout_seconds=2.5,
            force=True,
            volumes="-scratch",
            image="docker.io/library/busybox:1",
            image_digest=digest,
        )
    ]


def test_defaults_leave_the_choice_to_the_shim(node: Node) -> None:
    shim = counter(node)
    node.run("checkpoint", "counter")
    request = shim.requests[0]
    assert Path(request.path).parent == node.checkpoints
    assert Path(request.path).name.startswith("counter-2")
    assert (request.exit, request.tcp, request.rootfs_diff, request.timeout_seconds) == (False, "", True, 0)


@pytest.mark.parametrize(("time", "seconds"), [("2s", 2), ("500ms", 0.5), ("none", 365 * 86400)])
def test_most_time_of_a_freeze_reaches_the_shim(node: Node, time: str, seconds: float) -> None:
    shim = counter(node)
    node.run("checkpoint", "counter", "--max-freeze", time)
    assert shim.requests[0].max_freeze_seconds == pytest.approx(seconds)


def test_most_time_of_a_freeze_that_is_no_time_is_refused_before_anything_is_asked(node: Node) -> None:
    shim = counter(node)
    assert "a time above 0" in node.run("checkpoint", "counter", "--max-freeze", "fast", status=2).stderr
    assert not shim.requests


def test_name_without_slash_is_made_in_the_checkpoint_root(node: Node) -> None:
    shim = counter(node)
    node.run("checkpoint", "counter", "before-upgrade")
    assert shim.requests[0].path == str(node.checkpoints / "before-upgrade")


def test_pod_means_its_only_container(node: Node) -> None:
    node.containerd.add("p" * 64, namespace="k8s.io", pod="front", kind="sandbox", sandbox="p" * 64)
    node.containerd.add("c" * 64, namespace="k8s.io", pod="front", name="web", sandbox="p" * 64)
    shim = node.shim("p" * 64, namespace="k8s.io")
    shim.answers["Checkpoint"] = REPLY
    node.run("checkpoint", "shop/front")
    assert shim.requests[0].id == "c" * 64
    assert Path(shim.requests[0].path).name.startswith("front-web-2")
    assert Path(shim.requests[0].path).parent == node.checkpoints / "shop"


def test_image_of_a_pod_is_made_where_its_namespace_names_it(node: Node) -> None:
    node.containerd.add("p" * 64, namespace="k8s.io", pod="front", kind="sandbox", sandbox="p" * 64)
    node.containerd.add("c" * 64, namespace="k8s.io", pod="front", name="web", sandbox="p" * 64)
    shim = node.shim("p" * 64, namespace="k8s.io")
    shim.answers["Checkpoint"] = REPLY
    node.run("checkpoint", "shop/front", "before-upgrade")
    assert shim.requests[0].path == str(node.checkpoints / "shop" / "before-upgrade")


def test_status_is_asked_while_it_runs(node: Node) -> None:
    shim = counter(node)
    shim.watched = 3
    node.run("checkpoint", "counter")


def test_place_with_files_is_refused(node: Node, tmp_path: Path) -> None:
    shim = counter(node)
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "dump.log").touch()
    result = node.run("checkpoint", "counter", str(tmp_path / "image"), status=4)
    assert "is not an empty directory" in result.stderr
    assert shim.requests == []


def test_failure_says_what_became_of_the_container(node: Node) -> None:
    shim = counter(node)
    shim.add("counter", pid=os.getpid(), state="paused")
    shim.answers["Checkpoint"] = RpcError(Code.RESOURCE_EXHAUSTED, "the disk is full: 3 MiB free, 8 MiB needed")
    result = node.run("checkpoint", "counter", status=4)
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "kybernate: cannot checkpoint counter: the disk is full: 3 MiB free, 8 MiB needed",
        "  state:  container counter is paused",
    ]


def test_trace_is_shown_where_it_is_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYBERNATE_TRACE", "1")
    assert "Traceback" in node.run("checkpoint", "nobody", status=3).stderr


def test_unknown_container_is_not_found(node: Node) -> None:
    assert "no container has the id or the name 'nobody'" in node.run("checkpoint", "nobody", status=3).stderr


def test_namespace_limits_the_search(node: Node) -> None:
    counter(node)
    node.run("checkpoint", "counter", "-n", "k8s.io", status=3)


def test_container_of_another_shim_is_told(node: Node) -> None:
    node.containerd.add("stock", runtime="io.containerd.runc.v2")
    node.shim("stock", service="containerd.task.v3.Task")
    result = node.run("checkpoint", "stock", status=4)
    assert "its runtime is io.containerd.runc.v2" in result.stderr
    assert "runtimeClassName: kybernate" in result.stderr


def test_container_without_any_shim_of_ours_is_told(node: Node) -> None:
    node.containerd.add("vm", runtime="io.containerd.kata.v2")
    assert "does not run under Kybernate" in node.run("checkpoint", "vm", status=4).stderr


def test_older_shim_is_told(node: Node) -> None:
    node.containerd.add("old")
    node.shim("old", service="containerd.task.v3.Task")
    assert "the shim of old is too old" in node.run("checkpoint", "old", status=4).stderr


def test_containerd_may_be_named_through_a_link(node: Node) -> None:
    counter(node)
    link = Path(node.containerd.address).with_name("link")
    link.symlink_to(node.containerd.address)
    node.run("checkpoint", "counter", "--address", f"unix://{link}")


def test_dead_shim_is_told(node: Node) -> None:
    node.containerd.add("orphan")
    assert "the shim of orphan is dead" in node.run("checkpoint", "orphan", status=6).stderr


@pytest.mark.parametrize(("state", "words"), [("", "it has no task"), ("STOPPED", "its task is stopped")])
def test_container_without_processes_is_told(node: Node, state: str, words: str) -> None:
    node.containerd.add("ended", state=state)
    assert words in node.run("checkpoint", "ended", status=3).stderr


def test_missing_containerd_is_told(node: Node, tmp_path: Path) -> None:
    result = node.run("checkpoint", "counter", "--address", str(tmp_path / "nowhere"), status=6)
    assert "containerd does not answer" in result.stderr
    assert "--address" in result.stderr


@pytest.mark.parametrize("argv", [(), ("counter", "--tcp", "maybe"), ("counter", "--timeout", "-1"), ("a", "b", "c")])
def test_wrong_usage_is_status_2(node: Node, argv: tuple[str, ...]) -> None:
    node.run("checkpoint", *argv, status=2)


def test_hold_is_asked_for_and_shown(node: Node) -> None:
    shim = counter(node)
    held = wire.CheckpointResponse(held_seconds=90)
    held.MergeFrom(REPLY)
    shim.answers["Checkpoint"] = held
    for flags, seconds in (["--hold"], 0), (["--hold-for", "90"], 90), (["--hold", "--hold-for", "90"], 90):
        said = node.run("checkpoint", "counter", *flags).stdout
        assert "counter is held: `kybernate ps` shows it, `kybernate release` lets it continue" in said
        assert (shim.requests[-1].hold, shim.requests[-1].hold_seconds) == (True, seconds)


def test_shim_that_does_not_hold_is_told(node: Node) -> None:
    """One of an earlier release makes an image, and passes over what it does not know."""
    counter(node)
    failed = node.run("checkpoint", "counter", "--hold", status=1)
    assert "counter is not held" in failed.stderr
    assert "the image /images/i is complete, and the container, if it has not ended, runs on" in failed.stderr


@pytest.mark.parametrize("flag", ["--exit", "--tcp=established"])
def test_hold_is_not_for_what_ends(node: Node, flag: str) -> None:
    counter(node)
    assert "--hold excludes --exit" in node.run("checkpoint", "counter", "--hold", flag, status=2).stderr


def test_release_says_what_the_container_is_then(node: Node) -> None:
    shim = counter(node)
    shim.answers["Release"] = wire.ReleaseResponse(container=wire.Container(id="counter", state="running"))
    assert node.run("release", "counter").stdout == "released counter: it is running\n"
    assert shim.requests[-1].id == "counter"
    assert node.json("release", "counter") == {"namespace": "default", "container": "counter", "state": "running"}
    shim.answers["Release"] = RpcError(Code.FAILED_PRECONDITION, "container counter is not held. Nothing was changed")
    failed = node.run("release", "counter", status=4)
    assert "cannot release counter: container counter is not held" in failed.stderr


def test_container_that_a_kill_has_ended_is_not_told_to_run(node: Node) -> None:
    """The shim makes its exit known later than it answers."""
    shim = counter(node)
    shim.containers["counter"].pid = 1 << 30  # beyond every pid that the kernel gives
    shim.answers["Checkpoint"] = RpcError(Code.ABORTED, "checkpoint of container counter ended: it was killed")
    assert "state:  container counter has ended" in node.run("checkpoint", "counter", status=1).stderr

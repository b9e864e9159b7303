"""`delete`: its answer, byte by byte, and that it can be called at any time, any number of times."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint import cgroup_lease
from kybernate_shim.checkpoint.cleanup import Traces
from kybernate_shim.delete import answer, delete
from kybernate_shim.errors import Failed
from kybernate_shim.invocation import Invocation
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.bundle import CONNECTED, Bundle, CleanupRecord
from kybernate_shim.oci.preload_spec import make_turn_file


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**62))
def test_answer_is_what_protobuf_would_write(pid: int, now_ns: int) -> None:
    expected = wire.DeleteResponse(pid=pid or 2**32 - 1, exit_status=137)
    expected.exited_at.FromNanoseconds(now_ns)
    assert wire.DeleteResponse.FromString(answer(pid, now_ns)) == expected


class Node:
    """A bundle, and a runtime that notes its calls and does what a test says."""

    def __init__(self, directory: Path) -> None:
        self.bundle = directory / "bundle"
        self.bundle.mkdir()
        self.root = directory / "runc"
        self.calls = directory / "calls"
        self.runtime = directory / "fake-runc"
        (self.bundle / "runtime").write_text(str(self.runtime))
        (self.bundle / "options.json").write_text(json.dumps({"root": str(self.root)}))

    def known(self, script: str = "exit 0") -> None:
        """Let the runtime know the container, and do `script` when it is called."""
        (self.root / "ns" / "c1").mkdir(parents=True)
        self.runtime.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{script}\n')
        self.runtime.chmod(0o755)

    def delete(self, monkeypatch: pytest.MonkeyPatch) -> tuple[int, wire.DeleteResponse]:
        out = TextIOWrapper(BytesIO())
        monkeypatch.setattr(sys, "stdout", out)
        status = delete(Invocation(action="delete", namespace="ns", id="c1", bundle=str(self.bundle)))
        return status, wire.DeleteResponse.FromString(out.buffer.getvalue())  # type: ignore[attr-defined]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_container_that_is_gone_is_success_every_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        status, reply = node.delete(monkeypatch)
        assert (status, reply.pid, reply.exit_status) == (0, 2**32 - 1, 137)


def test_file_of_its_turn_goes_with_the_container(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_turn_file(tmp_path / "sources/turns/ns/c1")
    monkeypatch.setattr("kybernate_shim.run_directory.turn_file", lambda namespace, id: file)
    assert node.delete(monkeypatch)[0] == 0
    assert not file.exists()


def test_bundle_that_is_gone_is_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    node.bundle = tmp_path / "never was"
    assert node.delete(monkeypatch)[0] == 0


def test_runtime_runs_in_the_bundle(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.known("pwd > ran_here")
    assert node.delete(monkeypatch)[0] == 0
    assert (node.bundle / "ran_here").exists()


def test_container_that_is_left_is_deleted_by_force_with_its_own_root(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.known()
    (node.bundle / "init.pid").write_text(str(1 << 30))
    status, reply = node.delete(monkeypatch)
    assert (status, reply.pid) == (0, 1 << 30)
    words = node.calls.read_text().split()
    assert words[words.index("--root") + 1] == str(node.root / "ns")
    assert words[-3:] == ["delete", "--force", "c1"]


def test_runtime_that_no_longer_knows_it_is_success(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.known("echo 'container does not exist' >&2; exit 1")
    assert node.delete(monkeypatch)[0] == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo 'device busy' >&2; exit 1", "device busy"), (None, "Permission denied")],
    ids=["fails", "cannot be executed"],
)
def test_failure_of_the_runtime_is_told_and_still_answered(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
    words: str,
) -> None:
    node.known(script or "")
    if script is None:
        node.runtime.chmod(0o644)
    status, reply = node.delete(monkeypatch)
    assert (status, reply.exit_status) == (1, 137)
    said = capsys.readouterr().err
    assert said.startswith("containerd-shim-kybernate-v1: delete c1: ")
    assert words in said


def test_socket_of_the_dead_daemon_goes_and_a_living_ones_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    path = node.bundle.parent / "s"
    (node.bundle / "address").write_text(f"unix://{path}")
    monkeypatch.chdir(path.parent)  # the whole path may be too long to bind
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind("s")
        daemon.listen()
        (node.bundle / "address").write_text("unix://s")
        assert node.delete(monkeypatch)[0] == 0
        assert path.exists()
    assert node.delete(monkeypatch)[0] == 0
    assert not path.exists()


def test_first_container_of_a_pod_takes_those_along_that_have_lost_their_daemon_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd 2 calls no `delete` for those that it has connected to it by itself, but removes their bundles."""
    node.known()
    for name in ("app", "sidecar"):
        records = node.bundle / CONNECTED / name
        records.mkdir(parents=True)
        (records / "runtime").write_text(str(node.runtime))
        (records / "options.json").write_text(json.dumps({"root": str(node.root)}))
        (node.root / "ns" / name).mkdir()
    monkeypatch.chdir(node.bundle.parent)
    (node.bundle / "address").write_text("unix://s")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind("s")
        daemon.listen()
        assert node.delete(monkeypatch)[0] == 0
        assert deleted(node) == ["c1"]
    assert node.delete(monkeypatch)[0] == 0
    assert sorted(deleted(node)) == ["app", "c1", "c1", "sidecar"]


def deleted(node: Node) -> list[str]:
    return [line.split()[-1] for line in node.calls.read_text().splitlines()]


@pytest.mark.parametrize(("cgroups_path", "cleared"), [("/ns/c1", "/ns/c1"), ("/ns/another", ""), ("", "")])
def test_only_the_cgroup_that_the_dead_restore_held_is_cleared(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroups_path: str, cleared: str
) -> None:
    """Its configuration may name the cgroup of a container that runs."""
    asked: list[str] = []
    forgotten: list[str] = []

    @contextmanager
    def inherited(path: str, bundle: Path) -> Iterator[bool]:
        yield (path, bundle) == ("/ns/c1", node.bundle)

    def clear(traces: Traces, seconds: float) -> None:
        asked.append(traces.cgroups_path)
        if len(asked) == 1:
            raise Failed("it is still ending")

    monkeypatch.setattr(cgroup_lease, "inherited", inherited)
    monkeypatch.setattr(cgroup_lease, "forget", forgotten.append)
    monkeypatch.setattr(Traces, "clear_restore", clear)
    (node.bundle / "config.json").write_text(json.dumps({"linux": {"cgroupsPath": cgroups_path}}))
    Bundle(node.bundle).write_cleanup_record(CleanupRecord(root=str(tmp_path), phase="restore"))
    assert node.delete(monkeypatch)[0] == 1
    assert (asked, forgotten) == ([cleared], [])
    assert node.delete(monkeypatch)[0] == 0
    assert (asked, forgotten) == ([cleared] * 2, [cleared] if cleared else [])


@pytest.mark.parametrize("config", ["", "{", "[]", '{"linux": null}'])
def test_unreadable_configuration_keeps_nothing_from_deletion(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str
) -> None:
    node.known()
    (node.bundle / "config.json").write_text(config)
    Bundle(node.bundle).write_cleanup_record(CleanupRecord(root=str(tmp_path), phase="checkpoint"))
    assert node.delete(monkeypatch)[0] == 0
    assert "delete" in node.calls.read_text()

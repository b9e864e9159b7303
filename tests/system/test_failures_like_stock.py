"""Calls that fail: code and text that clients of containerd see, under our shim and under containerd's own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kybernate.messages import containers_pb2 as container_messages
from kybernate.messages import snapshots_pb2 as snapshots
from kybernate.messages import tasks_pb2 as wire
from kybernate.messages.containers_pb2_grpc import ContainersStub
from kybernate.messages.snapshots_pb2_grpc import SnapshotsStub
from kybernate.messages.tasks_pb2_grpc import TasksStub
from tests.system.cri import SOCKET, Cri
from tests.system.ctr import BUSYBOX, KYBERNATE, STOCK, Ctr, eventually

SPEC_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Process"
SECONDS = 60
SLEEP = ["sleep", "1000"]

Said = tuple[str, str]  # the code's name and the text, without what differs from one container to the next
Edit = Callable[[dict[str, Any]], object]


def process(**fields: Any) -> Edit:
    return lambda spec: spec["process"].update(fields)


def linux(**fields: Any) -> Edit:
    return lambda spec: spec["linux"].update(fields)


def mount(**fields: Any) -> Edit:
    return lambda spec: spec["mounts"].append({"type": "bind", "options": ["rbind"], **fields})


def network(path: str) -> Edit:
    def edit(spec: dict[str, Any]) -> None:
        others = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
        spec["linux"]["namespaces"] = [*others, {"type": "network", "path": path}]

    return edit


CREATES: dict[str, Edit] = {
    "program is missing": process(args=["/no/such/program"]),
    "program is not in PATH": process(args=["no-such-program"]),
    "program may not be executed": process(args=["/etc/passwd"]),
    "program is a directory": process(args=["/etc"]),
    "no arguments": process(args=[]),
    "working directory is a file": process(cwd="/etc/passwd"),
    "working directory is relative": process(cwd="tmp"),
    "unknown limit": process(rlimits=[{"type": "RLIMIT_NONE", "soft": 1, "hard": 1}]),
    "soft limit above the hard one": process(rlimits=[{"type": "RLIMIT_NOFILE", "soft": 1 << 40, "hard": 1 << 41}]),
    "source of a mount is missing": mount(source="/no/such/source", destination="/mnt"),
    "file over a directory": mount(source="/etc/passwd", destination="/etc"),
    "unknown filesystem": mount(type="nofs", source="nofs", destination="/mnt", options=[]),
    "destination is relative": mount(source="/tmp", destination="mnt/../.."),
    "namespace is missing": network("/no/such/namespace"),
    "namespace is of another kind": network("/proc/1/ns/uts"),
    "unknown sysctl": linux(sysctl={"kernel.none": "1"}),
    "unknown device": linux(devices=[{"path": "/dev/none", "type": "x", "major": 1, "minor": 3}]),
    "unknown action of seccomp": linux(seccomp={"defaultAction": "SCMP_ACT_NONE"}),
    "hook is missing": lambda spec: spec.update(hooks={"createRuntime": [{"path": "/no/such/hook"}]}),
    "hook fails": lambda spec: spec.update(hooks={"createRuntime": [{"path": "/bin/false"}]}),
    "root is missing": lambda spec: spec["root"].update(path="no-such-root"),
}

EXECS: dict[str, dict[str, Any]] = {
    "program is missing": {"args": ["/no/such/program"]},
    "program is not in PATH": {"args": ["no-such-program"]},
    "program may not be executed": {"args": ["/etc/passwd"]},
    "program is a directory": {"args": ["/etc"]},
    "no arguments": {"args": []},
    "working directory is a file": {"args": ["true"], "cwd": "/etc/passwd"},
    "working directory is missing": {"args": ["true"], "cwd": "/no/such/directory"},
    "unknown limit": {"args": ["true"], "rlimits": [{"type": "RLIMIT_NONE", "soft": 1, "hard": 1}]},
}


class Node:
    """containerd's own API, as any client calls it, for containers under one runtime."""

    def __init__(self, runtime: str, channel: grpc.Channel) -> None:
        self.ctr = Ctr(runtime=runtime)
        self._metadata = (("containerd-namespace", self.ctr.namespace),)
        self.tasks, self._containers, self._snapshots = (
            TasksStub(channel),
            ContainersStub(channel),
            SnapshotsStub(channel),
        )

    @contextmanager
    def container(self, edit: Edit) -> Iterator[str]:
        """Make a container whose specification is edited, and remove it with whatever has become of it."""
        id = self.ctr.new_id()
        self.ctr("container", "create", "--runtime", self.ctr.runtime, BUSYBOX, id, *SLEEP)
        try:
            found = self._containers.Get(
                container_messages.GetContainerRequest(id=id), metadata=self._metadata
            ).container
            spec = json.loads(found.spec.value)
            edit(spec)
            found.spec.value = json.dumps(spec).encode()
            request = container_messages.UpdateContainerRequest(container=found)
            request.update_mask.paths.append("spec")
            self._containers.Update(request, metadata=self._metadata)
            yield id
        finally:
            self.ctr.remove(id)

    def create_and_start(self, id: str) -> Said:
        mounts = self._snapshots.Mounts(
            snapshots.MountsRequest(snapshotter="overlayfs", key=id), metadata=self._metadata
        ).mounts
        request = wire.CreateTaskRequest(container_id=id)
        for one in mounts:
            request.rootfs.add(type=one.type, source=one.source, target=one.target, options=one.options)
        made = self.said("Create", request, id)
        return made if made[0] != "OK" else self.said("Start", wire.StartRequest(container_id=id), id)

    def said(self, method: str, request: Any, id: str) -> Said:
        """Call, and return what a client sees."""
        try:
            getattr(self.tasks, method)(request, metadata=self._metadata, timeout=SECONDS)
        except grpc.RpcError as error:
            return error.code().name, plain(error.details(), id)
        return "OK", ""

    def exec(self, id: str, exec_id: str, spec: dict[str, Any]) -> Said:
        """Add an exec and start it."""
        request = wire.ExecProcessRequest(container_id=id, exec_id=exec_id)
        request.spec.type_url = SPEC_TYPE
        whole = {"cwd": "/", "user": {"uid": 0, "gid": 0}, "env": ["PATH=/bin"], **spec}
        request.spec.value = json.dumps(whole).encode()
        added = self.said("Exec", request, id)
        started = wire.StartRequest(container_id=id, exec_id=exec_id)
        return added if added[0] != "OK" else self.said("Start", started, id)


def plain(text: str, id: str) -> str:
    """Return an error's text without what differs from one container, or one attempt, to the next."""
    return re.sub(r"\b[0-9a-f]{64}\b|\b\d{2,}\b", "N", text.replace(id, "ID"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """Ours and the stock one."""
    with grpc.insecure_channel(SOCKET) as channel:
        yield Node(KYBERNATE, channel), Node(STOCK, channel)


@pytest.mark.parametrize("name", CREATES)
def test_create_that_fails(nodes: tuple[Node, Node], name: str) -> None:
    said = []
    for node in nodes:
        with node.container(CREATES[name]) as id:
            said.append(node.create_and_start(id))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", EXECS)
def test_exec_that_fails(nodes: tuple[Node, Node], name: str) -> None:
    said = []
    for node in nodes:
        with node.ctr.running(*SLEEP) as id:
            said.append(node.exec(id, "e", EXECS[name]))
    assert said[0] == said[1]


def test_calls_in_the_wrong_state(nodes: tuple[Node, Node]) -> None:
    """Where the stock shim has no code for it, ours says that the state is the reason."""
    ours, stock = (dict(itertools.chain(_while_it_runs(node), _after_its_end(node))) for node in nodes)
    for name, (code, text) in stock.items():
        allowed = {code, "FAILED_PRECONDITION"} if code == "UNKNOWN" else {code}
        assert ours[name][0] in allowed, (name, ours[name], text)


def _while_it_runs(node: Node) -> Iterator[tuple[str, Said]]:
    with node.ctr.running(*SLEEP) as id:
        yield "start twice", node.said("Start", wire.StartRequest(container_id=id), id)
        yield "create twice", node.said("Create", wire.CreateTaskRequest(container_id=id), id)
        yield "delete while it runs", node.said("Delete", wire.DeleteTaskRequest(container_id=id), id)
        yield "resume while it runs", node.said("Resume", wire.ResumeTaskRequest(container_id=id), id)
        yield "exec of no JSON", node.said("Exec", _no_json(id), id)
        yield "unknown exec starts", node.said("Start", wire.StartRequest(container_id=id, exec_id="none"), id)
        yield "unknown exec is killed", node.said("Kill", wire.KillRequest(container_id=id, exec_id="none"), id)
        yield "unknown signal", node.said("Kill", wire.KillRequest(container_id=id, signal=99), id)
        yield "exec", node.exec(id, "e", {"args": SLEEP})
        yield "same exec once more", node.exec(id, "e", {"args": SLEEP})
        deleted = wire.DeleteProcessRequest(container_id=id, exec_id="e")
        yield "exec is deleted while it runs", node.said("DeleteProcess", deleted, id)
    with node.ctr.running(*SLEEP) as id:
        node.ctr("task", "pause", id)
        yield "pause twice", node.said("Pause", wire.PauseTaskRequest(container_id=id), id)
        yield "exec while it is paused", node.exec(id, "paused", {"args": SLEEP})
        node.ctr("task", "resume", id)


def _after_its_end(node: Node) -> Iterator[tuple[str, Said]]:
    with node.ctr.running(*SLEEP) as id:
        node.ctr("task", "kill", "-s", "SIGKILL", id)
        eventually(lambda: node.ctr.status(id) == "STOPPED")
        yield "kill after its end", node.said("Kill", wire.KillRequest(container_id=id, signal=15), id)
        yield "pause after its end", node.said("Pause", wire.PauseTaskRequest(container_id=id), id)
        yield "exec after its end", node.exec(id, "late", {"args": SLEEP})
        yield "start after its end", node.said("Start", wire.StartRequest(container_id=id), id)


def _no_json(id: str) -> wire.ExecProcessRequest:
    request = wire.ExecProcessRequest(container_id=id, exec_id="no-json")
    request.spec.type_url, request.spec.value = SPEC_TYPE, b"no JSON"
    return request


@pytest.mark.parametrize("command", [["/no/such/program"], ["no-such-program"], ["/etc/passwd"], ["/etc"]])
def test_cri_says_the_same(command: list[str]) -> None:
    said = []
    for handler in ("kybernate", "runc"):
        with Cri(handler=handler) as cri, cri.pod() as pod:
            runs, bad = cri.run(pod, "runs", SLEEP), cri.create(pod, "bad", command)
            for call, id in ((lambda id: cri.start(id), bad), (lambda id: cri.exec(id, *command), runs)):
                with pytest.raises(grpc.RpcError) as error:
                    call(id)
                said.append((error.value.code().name, plain(error.value.details(), id)))  # type: ignore[attr-defined]
            status = cri.status(bad)
            said.append((status.exit_code, status.reason, plain(status.message, bad)))
    assert said[:3] == said[3:]

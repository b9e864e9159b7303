"""Calls that fail: code and text that clients of containerd see, under our shim and under containerd's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.system.cri import SOCKET, Cri
from tests.system.ctr import KYBERNATE, STOCK
from tests.system.task_calls import SLEEP, Edit, Node, plain


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

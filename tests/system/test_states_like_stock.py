"""Every call of containerd's Task service in every state of a task and of an exec, by our shim and by the stock one.

A client decides by the code: what one shim answers with UNKNOWN, a client of it treats as a failure without a name, and
what has a name, as a fact that it may ignore.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.messages import tasks_pb2 as wire
from kybernate_shim.address import socket_path
from tests.system.cri import SOCKET
from tests.system.ctr import KYBERNATE, STOCK, eventually
from tests.system.task_calls import RESOURCES_TYPE, SLEEP, SPEC_TYPE, Node, Said, exec_request

pytestmark = pytest.mark.as_root("no checkpoint is made: the calls are those that a state refuses")
SHORT = 1.0  # seconds that a call may take whose answer is that there is none yet
_numbers = itertools.count()

Call = Callable[[Node, str], Said]


def call(method: str, kind: type, **fields: Any) -> Call:
    return lambda node, id: node.said(method, kind(container_id=id, **fields), id)


def add_exec(node: Node, id: str) -> Said:
    return node.said("Exec", exec_request(id, f"new{next(_numbers)}", {"args": SLEEP}), id)


def add_no_json(node: Node, id: str) -> Said:
    request = wire.ExecProcessRequest(container_id=id, exec_id=f"bad{next(_numbers)}")
    request.spec.type_url, request.spec.value = SPEC_TYPE, b"no JSON"
    return node.said("Exec", request, id)


def wait(exec_id: str = "") -> Call:
    """Wait, and say where there is nothing yet, which either side's deadline finds."""

    def said(node: Node, id: str) -> Said:
        code, text = node.said("Wait", wire.WaitRequest(container_id=id, exec_id=exec_id), id, seconds=SHORT)
        return ("WAITS", "") if "deadline exceeded" in f"{code} {text}".replace("_", " ").lower() else (code, text)

    return said


def update(value: bytes) -> Call:
    def said(node: Node, id: str) -> Said:
        request = wire.UpdateTaskRequest(container_id=id)
        request.resources.type_url, request.resources.value = RESOURCES_TYPE, value
        return node.said("Update", request, id)

    return said


# Those that change a task come last: what they leave is no longer the state.
CALLS: dict[str, Call] = {
    "Create": lambda node, id: node.create(id),
    "Get": call("Get", wire.GetRequest),
    "ListPids": call("ListPids", wire.ListPidsRequest),
    "Metrics": lambda node, id: node.said("Metrics", wire.MetricsRequest(filters=[f"id=={id}"]), id),
    "Wait": wait(),
    "CloseIO": call("CloseIO", wire.CloseIORequest, stdin=True),
    "ResizePty": call("ResizePty", wire.ResizePtyRequest, width=80, height=24),
    "Update": update(b"{}"),
    "Update of no JSON": update(b"no JSON"),
    "Exec": add_exec,
    "Exec of no JSON": add_no_json,
    "Start of an unknown exec": call("Start", wire.StartRequest, exec_id="none"),
    "Kill of an unknown exec": call("Kill", wire.KillRequest, exec_id="none", signal=15),
    "Get of an unknown exec": call("Get", wire.GetRequest, exec_id="none"),
    "Wait of an unknown exec": wait("none"),
    "DeleteProcess of an unknown exec": call("DeleteProcess", wire.DeleteProcessRequest, exec_id="none"),
    "Kill by an unknown signal": call("Kill", wire.KillRequest, signal=99),
    "Kill by no signal": call("Kill", wire.KillRequest, signal=0),
    "Kill by SIGWINCH": call("Kill", wire.KillRequest, signal=28),
    "Kill of all by SIGWINCH": call("Kill", wire.KillRequest, signal=28, all=True),
    "Resume": call("Resume", wire.ResumeTaskRequest),
    "Pause": call("Pause", wire.PauseTaskRequest),
    "Start": call("Start", wire.StartRequest),
    "Delete": call("Delete", wire.DeleteTaskRequest),
}

EXEC_CALLS: dict[str, Call] = {
    "Exec of the same id": lambda node, id: node.said("Exec", exec_request(id, "e", {"args": SLEEP}), id),
    "Get": call("Get", wire.GetRequest, exec_id="e"),
    "Wait": wait("e"),
    "CloseIO": call("CloseIO", wire.CloseIORequest, exec_id="e", stdin=True),
    "ResizePty": call("ResizePty", wire.ResizePtyRequest, exec_id="e", width=80, height=24),
    "Kill by an unknown signal": call("Kill", wire.KillRequest, exec_id="e", signal=99),
    "Kill by no signal": call("Kill", wire.KillRequest, exec_id="e", signal=0),
    "Kill by SIGWINCH": call("Kill", wire.KillRequest, exec_id="e", signal=28),
    "Start": call("Start", wire.StartRequest, exec_id="e"),
    "DeleteProcess": call("DeleteProcess", wire.DeleteProcessRequest, exec_id="e"),
}


def as_created(node: Node, id: str) -> None:
    assert node.create(id)[0] == "OK"


def as_running(node: Node, id: str) -> None:
    assert node.create_and_start(id)[0] == "OK"


def as_paused(node: Node, id: str) -> None:
    as_running(node, id)
    node.ctr("task", "pause", id)


def as_stopped(node: Node, id: str) -> None:
    as_running(node, id)
    node.ctr("task", "kill", "-s", "SIGKILL", id)
    eventually(lambda: node.ctr.status(id) == "STOPPED")


STATES = {"created": as_created, "running": as_running, "paused": as_paused, "stopped": as_stopped}


def exec_added(node: Node, id: str) -> None:
    as_running(node, id)
    assert node.said("Exec", exec_request(id, "e", {"args": SLEEP}), id)[0] == "OK"


def exec_running(node: Node, id: str) -> None:
    exec_added(node, id)
    assert node.said("Start", wire.StartRequest(container_id=id, exec_id="e"), id)[0] == "OK"


def exec_stopped(node: Node, id: str) -> None:
    exec_running(node, id)
    assert node.said("Kill", wire.KillRequest(container_id=id, exec_id="e", signal=9), id)[0] == "OK"
    assert node.said("Wait", wire.WaitRequest(container_id=id, exec_id="e"), id)[0] == "OK"


def exec_paused(node: Node, id: str) -> None:
    exec_running(node, id)
    node.ctr("task", "pause", id)


def exec_added_then_stopped(node: Node, id: str) -> None:
    exec_added(node, id)
    node.ctr("task", "kill", "-s", "SIGKILL", id)
    eventually(lambda: node.ctr.status(id) == "STOPPED")


def exec_added_then_paused(node: Node, id: str) -> None:
    exec_added(node, id)
    node.ctr("task", "pause", id)


EXEC_STATES = {
    "added": exec_added,
    "running": exec_running,
    "stopped": exec_stopped,
    "running in a paused container": exec_paused,
    "added in a paused container": exec_added_then_paused,
    "added in a stopped container": exec_added_then_stopped,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """Ours and the stock one."""
    with grpc.insecure_channel(SOCKET) as channel:
        yield Node(KYBERNATE, channel), Node(STOCK, channel)


@contextmanager
def in_state(node: Node, prepare: Callable[[Node, str], None]) -> Iterator[str]:
    with node.container(lambda spec: None) as id:
        prepare(node, id)
        yield id
    if node.ctr.runtime == STOCK:  # it leaves its socket where a client still waits for an exec
        socket_path(SOCKET.removeprefix("unix://"), node.ctr.namespace, id).unlink(missing_ok=True)


@pytest.mark.parametrize("state", STATES)
def test_task(nodes: tuple[Node, Node], state: str) -> None:
    ours, stock = (answers(node, STATES[state], CALLS) for node in nodes)
    assert codes(ours) == codes(stock), differences(ours, stock)


@pytest.mark.parametrize("state", EXEC_STATES)
def test_exec(nodes: tuple[Node, Node], state: str) -> None:
    ours, stock = (answers(node, EXEC_STATES[state], EXEC_CALLS) for node in nodes)
    assert codes(ours) == codes(stock), differences(ours, stock)


@pytest.mark.parametrize("state", STATES)
def test_checkpoint(nodes: tuple[Node, Node], state: str, tmp_path: Path) -> None:
    """In the states where it cannot be made: containerd makes it with a pause of its own where the task runs."""
    ours, stock = (
        answers(node, STATES[state], {"Checkpoint": call("Checkpoint", wire.CheckpointTaskRequest)}) for node in nodes
    )
    assert codes(ours) == codes(stock), differences(ours, stock)


def answers(node: Node, prepare: Callable[[Node, str], None], calls: dict[str, Call]) -> dict[str, Said]:
    """Return what each call is answered with; a new container after each that was carried out."""
    said: dict[str, Said] = {}
    left = dict(calls)
    while left:
        with in_state(node, prepare) as id:
            before = node.statuses(id)
            while left and node.statuses(id) == before:
                name = next(iter(left))
                said[name] = left.pop(name)(node, id)
    return said


def codes(answers: dict[str, Said]) -> dict[str, str]:
    return {name: code for name, (code, _) in answers.items()}


def differences(ours: dict[str, Said], stock: dict[str, Said]) -> str:
    return "\n".join(f"{name}: ours {ours[name]}, stock {stock[name]}" for name in ours if ours[name] != stock[name])

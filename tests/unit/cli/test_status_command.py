"""`kybernate ps` and `kybernate status`."""

from __future__ import annotations

from kybernate_shim.messages import shim_pb2 as wire
from tests.unit.cli.conftest import Node

POD, WEB = "a" * 64, "b" * 64


def populate(node: Node) -> None:
    """A container with work in progress, a pod with two containers, one of another shim, one with a dead shim."""
    node.containerd.add("counter", image="busybox")
    node.containerd.add(
        POD, namespace="k8s.io", pod="front", kind="sandbox", sandbox=POD, runtime="io.containerd.runc.v2"
    )
    node.containerd.add(WEB, namespace="k8s.io", pod="front", name="web", sandbox=POD, runtime="io.containerd.runc.v2")
    node.containerd.add("stock", runtime="io.containerd.runc.v2")
    node.containerd.add("orphan")
    node.containerd.add("never-started", state="")
    node.shim("stock", service="containerd.task.v3.Task")
    node.shim("counter").add(
        "counter", phase="checkpoint", step="dump", done_bytes=1 << 20, total_bytes=4 << 20, seconds=2, cuda_pids=[7, 8]
    )
    pod = node.shim(POD, namespace="k8s.io")
    pod.add(POD, pid=10)
    pod.add(WEB, pid=11, suspended=True)


def test_ps_lists_the_containers_of_our_shims(node: Node) -> None:
    populate(node)
    result = node.run("ps")
    rows = [line.split("   ") for line in result.stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["CONTAINER", "NAME", "STATE", "PHASE", "STEP", "DONE", "PID", "NAMESPACE"],
        ["counter", "counter", "running", "checkpoint", "dump", "1.00 MiB of 4.00 MiB", "4242", "default"],
        ["orphan", "orphan", "unknown", "4242", "default"],
        ["a" * 13, "shop/front/(sandbox)", "running", "10", "k8s.io"],
        ["b" * 13, "shop/front/web", "running, suspended", "11", "k8s.io"],
    ]
    assert "the shim of orphan is dead" in result.stderr


def test_ps_as_json(node: Node) -> None:
    populate(node)
    listed = {one["container"]: one for one in node.json("ps")}
    assert set(listed) == {"counter", "orphan", POD, WEB}
    assert listed[WEB]["suspended"] is True
    assert listed[WEB]["pod"] == "front"
    assert listed["counter"]["done_bytes"] == 1 << 20
    assert "is dead" in listed["orphan"]["problem"]


def test_ps_in_one_namespace(node: Node) -> None:
    populate(node)
    assert [one["container"] for one in node.json("ps", "-n", "k8s.io")] == [POD, WEB]


def test_ps_of_an_empty_node(node: Node) -> None:
    assert node.json("ps") == []
    assert node.run("ps").stdout.split()[0] == "CONTAINER"


def test_status_of_one_container(node: Node) -> None:
    populate(node)
    assert node.run("status", "counter").stdout.splitlines() == [
        "container:      counter",
        "namespace:      default",
        "image:          busybox",
        "runtime:        io.containerd.kybernate.v1",
        "state:          running",
        "pid:            4242",
        "CUDA processes: 7, 8",
        "phase:          checkpoint",
        "step:           dump",
        "done:           1.00 MiB of 4.00 MiB",
        "for:            2.00 s",
    ]


def test_status_as_json(node: Node) -> None:
    populate(node)
    assert node.json("status", "front/web") == {
        "namespace": "k8s.io",
        "container": WEB,
        "pod_namespace": "shop",
        "pod": "front",
        "name": "web",
        "image": "",
        "runtime": "io.containerd.runc.v2",
        "state": "running",
        "suspended": True,
        "held_seconds": 0.0,
        "pid": 11,
        "gpu": "",
        "parked_bytes": 0,
        "cuda_pids": [],
        "cuda": [],
        "arena": None,
        "note": "",
        "phase": "",
        "step": "",
        "done_bytes": 0,
        "total_bytes": 0,
        "seconds": 0.0,
        "problem": "",
    }


def test_status_without_a_name_is_ps(node: Node) -> None:
    populate(node)
    assert node.run("status").stdout == node.run("ps").stdout


def test_status_of_what_the_shim_does_not_know(node: Node) -> None:
    node.containerd.add("ghost")
    node.shim("ghost")
    assert "is unknown to its shim" in node.run("status", "ghost", status=3).stderr


def test_what_is_odd_about_gpu_state_is_told_beside_the_table(node: Node) -> None:
    node.containerd.add("counter")
    arena = wire.Arena(asked=True, reasons=["process 7: too little room"])
    cuda = [wire.CudaProcess(pid=7, state="locked")]
    node.shim("counter").add("counter", gpu="locked", note="let it go", cuda_pids=[7], cuda=cuda, arena=arena)
    result = node.run("ps")
    assert "running, locked" in result.stdout
    assert "counter: let it go" in result.stderr
    assert "counter: arena: process 7: too little room" in result.stderr
    shown = node.json("status", "counter")
    assert shown["cuda"] == [{"pid": 7, "state": "locked"}]
    assert shown["arena"] == {"asked": True, "bytes": 0, "reasons": ["process 7: too little room"]}


def test_environments_of_all_containers_need_not_fit_into_one_message(node: Node) -> None:
    node.containerd.most_bytes = 1 << 14
    for number in range(8):
        node.containerd.add(f"many-{number}", environment="x" * (1 << 12))
    assert len(node.json("ps")) == 8


def test_records_too_large_without_task_and_snapshot_hide_no_other(node: Node) -> None:
    node.containerd.most_bytes = 1 << 14
    large = ["a", "app.b-1_x", "app.b-1_y"]
    for id in ("app.b", "c"):
        node.containerd.add(id)
        node.shim(id).add(id)
    for id in large:
        node.containerd.add(id, environment="x" * (1 << 15), state="")  # neither has its name
    assert [one["container"] for one in node.json("ps")] == ["app.b", "c"]
    assert node.run("status", "c").exit_code == 0
    for id in large:
        assert f"record of container {id} is larger" in node.run("status", id, status=1).stderr


def test_shims_that_do_not_answer_are_not_waited_for_one_after_another(node: Node) -> None:
    """containerd's list asks each of them in turn; where it does not come, all are asked together."""
    for id in ("a", "b", "c", "d"):
        node.containerd.add(id)
        node.shim(id).add(id)
    node.containerd.silent = {("default", "a"), ("default", "b")}
    listed = {one["container"]: one for one in node.json("ps")}
    assert {id: one["problem"] for id, one in listed.items() if id in "cd"} == {"c": "", "d": ""}
    assert set(listed) == {"a", "b", "c", "d"}
    assert node.run("status", "c").exit_code == 0


def test_container_of_a_record_too_large_is_named_and_the_others_are_listed(node: Node) -> None:
    node.containerd.most_bytes = 1 << 14
    for id in ("a", "c", "e"):
        node.containerd.add(id)
        node.shim(id).add(id)
    for id in ("b", "d"):  # one is found by its task, one by its snapshot
        node.containerd.add(id, environment="x" * (1 << 15), state="RUNNING" if id == "b" else "")
        node.containerd.snapshots[id] = ""
    listed = {one["container"]: one for one in node.json("ps")}
    assert set(listed) == {"a", "b", "c", "e"}  # what has no task is not listed
    assert "larger than one of its messages" in listed["b"]["problem"]
    assert [one["problem"] for id, one in listed.items() if id != "b"] == ["", "", ""]
    assert node.run("status", "c").exit_code == 0
    for id in ("b", "d"):
        refused = node.run("status", id, status=1)
        assert f"record of container {id} is larger" in refused.stderr


def test_held_container_is_shown_with_its_deadline(node: Node) -> None:
    node.containerd.add("counter")
    node.shim("counter").add("counter", state="held", held_seconds=90.0)
    assert "held:      for 1 min 30 s at most" in node.run("status", "counter").stdout
    assert node.json("status", "counter")["held_seconds"] == 90.0
    (listed,) = node.json("ps")
    assert listed["state"] == "held"

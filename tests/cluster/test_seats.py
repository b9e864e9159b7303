"""Seats as resources of kubelet: its real device manager, our plugin in the agent, and a pretended GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cluster.in_cluster import SETTINGS, access
from tests.cluster.kubectl import Kubectl, KubectlFailed
from tests.cluster.pods import container, deployment, pod
from tests.lab.cluster.addresses import SECONDS
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually
from tests.system.gpu import toolkit

ONE, TWO = "kyb.ai/gpu-1x-seat", "kyb.ai/gpu-2x-seat"
PYTHON = "/opt/kybernate/bin/python"
CONFIGURATION = 'seats.file = "/etc/kybernate/seats.yaml"\n'
BY_CDI = 'seats.devices = "cdi"\n'
SEATS = f"""
profiles:
  - {{name: gpu-1x-seat, resource: {ONE}, groupSize: 1, seatsPerGroup: 4}}
  - {{name: gpu-2x-seat, resource: {TWO}, groupSize: 2, seatsPerGroup: 3}}
gpuTopology:
  groups: [{{name: G0, gpus: [0]}}, {{name: G01, gpus: [0, 1]}}]
rules: {{minimumResidency: 0.2, slice: 1, yieldAfter: 0.1, idleAfter: 0, reserve: 8Mi, ramLow: 0, ramHigh: 0}}
"""


@pytest.fixture(scope="module")
def node(cluster: Cluster, administrator: Kubectl) -> Iterator[Node]:
    """The cluster's node with two pretended GPUs, one of which has seats of its own."""
    with access(administrator, cluster.nodes[0]):
        yield from _with_seats(cluster.nodes[0])


def _with_seats(found: Node) -> Iterator[Node]:
    if not found.path(toolkit.RUNTIME).exists():
        pytest.skip("NVIDIA's container toolkit could not be built for this node")
    found.run("env", "-C", "/src", PYTHON, "-m", "tests.cluster.pretended_gpus", "install")
    places = [found.path(name) for name in (SETTINGS, "/etc/kybernate/seats.yaml")]
    before = [place.read_text() if place.exists() else None for place in places]
    for place, old, text in zip(places, before, (CONFIGURATION, SEATS), strict=True):
        place.write_text(text + (old or ""))
    found.agent.restart()
    yield found
    for place, old in zip(places, before, strict=True):
        place.unlink()
        if old is not None:
            place.write_text(old)
    found.agent.restart()
    found.run("env", "-C", "/src", PYTHON, "-m", "tests.cluster.pretended_gpus", "remove")


@pytest.fixture(autouse=True)
def _advertised(kubectl: Kubectl, node: Node) -> None:
    advertises(kubectl, node, {ONE: 4, TWO: 3})


def advertises(kubectl: Kubectl, node: Node, seats: dict[str, int]) -> None:
    """Wait until kubelet has told the API server that so many seats can be allocated."""

    def shown() -> dict[str, int]:
        found = kubectl.get("node", node.name)["status"]["allocatable"]
        return {name: int(found.get(name, -1)) for name in seats}

    try:
        eventually(lambda: shown() == seats, seconds=SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {shown()} are advertised, and not {seats}") from error


@pytest.fixture
def by_cdi(kubectl: Kubectl, node: Node, _advertised: None) -> Iterator[None]:
    """Have the plugin answer with names of CDI devices, which containerd looks up in the node's specification."""
    place = node.path(SETTINGS)
    before = place.read_text()
    for text in (BY_CDI + before, before):
        node.agent.kill()
        advertises(kubectl, node, {ONE: 0, TWO: 0})  # else a pod could be given a seat by the plugin that has ended
        place.write_text(text)
        node.agent.start()
        node.agent.wait_ready(seconds=SECONDS)
        advertises(kubectl, node, {ONE: 4, TWO: 3})
        if text != before:
            yield


def with_seat(resource: str = ONE, count: int = 1) -> dict[str, object]:
    return container("main", resources={"limits": {resource: count}})


def environment(kubectl: Kubectl, name: str) -> dict[str, str]:
    lines = kubectl.exec(name, "env").splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith(("KYB_", "CUDA_", "NVIDIA_")))


def seats_of(kubectl: Kubectl) -> dict[str, str]:
    """Return the seat of each running pod."""
    running = [one["metadata"]["name"] for one in kubectl.items("pods") if one["status"]["phase"] == "Running"]
    return {name: environment(kubectl, name)["KYB_GPU_SEAT"] for name in running}


def test_four_replicas_share_a_gpu_of_four_seats(kubectl: Kubectl) -> None:
    kubectl.apply(deployment("serve", replicas=4, handler="kybernate", containers=[with_seat()]))
    kubectl.rolled_out("deployment/serve")
    assert sorted(seats_of(kubectl).values()) == ["g0-s0", "g0-s1", "g0-s2", "g0-s3"]


def test_a_fifth_pod_is_told_why_it_waits(kubectl: Kubectl) -> None:
    kubectl.apply(deployment("serve", replicas=5, handler="kybernate", containers=[with_seat()]))
    eventually(lambda: len(seats_of(kubectl)) == 4, seconds=SECONDS)
    eventually(lambda: f"Insufficient {ONE}" in kubectl.events(), seconds=SECONDS)
    (waiting,) = [one for one in kubectl.items("pods") if one["status"]["phase"] == "Pending"]
    (running, *_) = seats_of(kubectl)
    freed = environment(kubectl, running)["KYB_GPU_SEAT"]
    kubectl("scale", "deployment/serve", "--replicas=4")
    kubectl.delete(f"pod/{running}")
    assert waiting["metadata"]["name"]
    eventually(lambda: freed in seats_of(kubectl).values() and len(seats_of(kubectl)) == 4, seconds=SECONDS)


def test_a_container_gets_the_gpus_of_its_group_and_no_others(kubectl: Kubectl) -> None:
    kubectl.apply(pod("one", handler="kybernate", containers=[with_seat()]))
    kubectl.apply(pod("two", handler="kybernate", containers=[with_seat(TWO)]))
    kubectl.ready("pod/one", "pod/two")
    found = environment(kubectl, "one")
    assert re.fullmatch("g0-s[0-3]", found.pop("KYB_GPU_SEAT"))  # the others may be of pods that are being deleted
    assert found == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "KYB_GPU_INDICES": "0",
        "KYB_GPU_GROUP": "G0",
    }
    assert environment(kubectl, "two")["KYB_GPU_INDICES"] == "0,1"
    assert kubectl.exec("one", "sh", "-c", "ls /dev/nvidia*").split() == [
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
    ]
    assert "/dev/nvidia1" in kubectl.exec("two", "sh", "-c", "ls /dev/nvidia*").split()


def test_two_seats_for_one_container_are_refused_in_words(kubectl: Kubectl) -> None:
    kubectl.apply(pod("greedy", handler="kybernate", containers=[with_seat(count=2)]))
    kubectl.phase("greedy", "Failed")
    status = kubectl.get("pod", "greedy")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "a container can have one seat, and asks for 2" in status["message"]


def test_seats_outlive_a_restart_of_kubelet(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("before", handler="kybernate", containers=[with_seat()], restartPolicy="Always"))
    kubectl.ready("pod/before")
    node.kubelet.restart()
    node.kubelet.wait_ready(seconds=SECONDS)
    kubectl.apply(pod("after", handler="kybernate", containers=[with_seat()]))
    kubectl.ready("pod/after")
    found = seats_of(kubectl)
    assert found.keys() == {"before", "after"}
    assert len(set(found.values())) == 2
    with suppress(KubectlFailed):  # the container may end before the command in it has
        kubectl.exec("before", "kill", "1")
    eventually(lambda: restarts(kubectl, "before") == 1, seconds=SECONDS)  # with the seat that kubelet remembers
    assert seats_of(kubectl)["before"] == "g0-s0"


def test_seats_outlive_a_restart_of_the_plugin(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("before", handler="kybernate", containers=[with_seat()]))
    kubectl.ready("pod/before")
    node.agent.kill()
    advertises(kubectl, node, {ONE: 0, TWO: 0})
    assert kubectl.exec("before", "echo", "runs") == "runs\n"
    node.agent.start()
    node.agent.wait_ready(seconds=SECONDS)
    advertises(kubectl, node, {ONE: 4, TWO: 3})
    kubectl.apply(pod("after", handler="kybernate", containers=[with_seat()]))
    kubectl.ready("pod/after")
    found = seats_of(kubectl)
    assert found.keys() == {"before", "after"}
    assert len(set(found.values())) == 2


def computing(name: str, **fields: object) -> dict[str, object]:
    """Return a pod with a seat of GPU 0, whose program checks its memory on the GPU with each step."""
    main = container(
        "main", "python3", "-u", "/run/fake-cuda/driver/computes.py", "2", "20", of="python",
        resources={"limits": {ONE: 1}},
        env=[{"name": "LD_LIBRARY_PATH", "value": "/run/fake-cuda/driver"}],
        volumeMounts=[{"name": "gpus", "mountPath": "/run/fake-cuda"}],
    )  # fmt: skip
    volumes = [{"name": "gpus", "hostPath": {"path": "/run/fake-cuda"}}]
    return pod(name, handler="kybernate", containers=[main], volumes=volumes, terminationGracePeriodSeconds=1, **fields)


def statuses(node: Node) -> dict[str, str]:
    """Return the status of each pod's seat, by the pod's name."""
    found = json.loads(node.run("kybernate", "seats", "-o", "json"))
    return {one["container_title"].split("/")[1]: one["status"] for one in found if one["container_title"]}


def last_step(kubectl: Kubectl, name: str) -> int:
    """Return the last step of a pod's program; it ends where its memory has changed."""
    lines = kubectl.logs(name, "--tail=2").splitlines()
    assert all(line.startswith("step ") for line in lines), lines
    return int(lines[-1].split()[1]) if lines else 0


def mounts_of(kubectl: Kubectl, name: str) -> set[str]:
    """Return where a pod's container has mounts."""
    return {line.split()[4] for line in kubectl.exec(name, "cat", "/proc/self/mountinfo").splitlines()}


def computes_on(kubectl: Kubectl, name: str) -> None:
    before = last_step(kubectl, name)
    eventually(lambda: last_step(kubectl, name) > before + 2, seconds=SECONDS)


def test_two_pods_take_turns_on_one_gpu(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(computing("one"))
    kubectl.ready("pod/one")
    kubectl.apply(computing("two"))
    kubectl.ready("pod/two")
    eventually(lambda: statuses(node) == {"one": "suspended", "two": "active"}, seconds=SECONDS)
    for awake, asleep in (("one", "two"), ("two", "one")):
        node.run("kybernate", "wake", f"{kubectl.namespace}/{awake}")
        computes_on(kubectl, awake)
        eventually(lambda: statuses(node)[asleep] == "suspended", seconds=SECONDS)  # noqa: B023
    assert "SeatSuspended" in kubectl.events()


def test_a_pod_that_is_deleted_leaves_its_turn_to_others(kubectl: Kubectl, node: Node) -> None:
    """While it is suspended, and while its start waits."""
    kubectl.apply(computing("asleep"))
    kubectl.ready("pod/asleep")
    kubectl.apply(computing("active"))
    kubectl.ready("pod/active")
    eventually(lambda: statuses(node) == {"asleep": "suspended", "active": "active"}, seconds=SECONDS)
    kubectl.delete("pod/asleep")
    eventually(lambda: statuses(node) == {"active": "active"}, seconds=SECONDS)
    kubectl.apply(computing("waits"))
    kubectl.delete("pod/waits")
    eventually(lambda: statuses(node) == {"active": "active"} or statuses(node) == {"active": "suspended"},
               seconds=SECONDS)  # fmt: skip
    node.run("kybernate", "wake", f"{kubectl.namespace}/active")
    computes_on(kubectl, "active")


def test_a_higher_priority_class_preempts(kubectl: Kubectl, node: Node) -> None:
    high = {
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "seats-high"},
        "value": 1000, "preemptionPolicy": "Never",
    }  # fmt: skip
    kubectl.apply(high)
    try:
        kubectl.apply(computing("low"))
        kubectl.ready("pod/low")
        kubectl.apply(computing("high", priorityClassName="seats-high"))
        kubectl.ready("pod/high")
        eventually(lambda: statuses(node) == {"low": "suspended", "high": "active"}, seconds=SECONDS)
        found = json.loads(node.run("kybernate", "why", f"{kubectl.namespace}/high", "-o", "json"))
        assert found["priority"] == 1000
        computes_on(kubectl, "high")
    finally:
        kubectl.delete("priorityclass/seats-high")


def restarts(kubectl: Kubectl, name: str) -> int:
    (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
    return int(status["restartCount"]) if status["ready"] else -1


def test_pods_take_turns_by_use_alone(kubectl: Kubectl, node: Node) -> None:
    """Without a request: a program that waits in the driver gets its turn, also that of a user without capabilities."""
    confined = {"runAsUser": 1000, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    kubectl.apply(computing("one"))
    kubectl.ready("pod/one")
    other = computing("two")
    other["spec"]["containers"][0]["securityContext"] = confined  # type: ignore[index]
    kubectl.apply(other)
    kubectl.ready("pod/two")
    for _ in range(2):
        for name in ("one", "two"):
            computes_on(kubectl, name)
    assert restarts(kubectl, "one") == restarts(kubectl, "two") == 0


def test_a_container_gets_its_gpu_by_cdi_and_continues_in_another_pod(
    kubectl: Kubectl, node: Node, by_cdi: None
) -> None:
    """Kubelet hands on the plugin's names of devices, and containerd adds what NVIDIA's generator has written."""
    found = computing("first")
    (main,) = found["spec"]["containers"]  # type: ignore[index]
    del main["env"]  # the driver is where the loader looks
    kubectl.apply(found)
    kubectl.ready("pod/first")
    computes_on(kubectl, "first")
    given = environment(kubectl, "first")
    assert (given["NVIDIA_VISIBLE_DEVICES"], given["KYB_GPU_GROUP"]) == ("void", "G0")  # the specification's, ours
    mounts = mounts_of(kubectl, "first")
    assert f"{toolkit.LIBRARIES}/libcuda.so.{toolkit.VERSION}" in mounts
    assert any(place.startswith("/run/nvidia-ctk-hook/") for place in mounts)
    assert kubectl.exec("first", "sh", "-c", "ls /dev/nvidia?").split() == ["/dev/nvidia0"]
    name = f"{kubectl.namespace}/first"
    node.run("kybernate", "suspend", name)
    node.run("kybernate", "resume", name)
    computes_on(kubectl, "first")
    node.run("kybernate", "checkpoint", name, "by-cdi", "--exit")
    last = last_step(kubectl, "first")
    kubectl.phase("first", "Failed")
    annotations = {"kybernate.io/restore-from": "by-cdi"}
    kubectl.apply({**found, "metadata": {"name": "second", "annotations": annotations}})
    kubectl.ready("pod/second")
    computes_on(kubectl, "second")
    assert last_step(kubectl, "second") > last
    assert mounts_of(kubectl, "second") == mounts

"""Seats as resources of kubelet: its real device manager, our plugin in the agent, and a pretended GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cluster.in_cluster import SETTINGS
from tests.cluster.kubectl import Kubectl, KubectlFailed
from tests.cluster.pods import container, deployment, pod
from tests.lab.cluster.addresses import SECONDS
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

ONE, TWO = "kyb.ai/gpu-1x-seat", "kyb.ai/gpu-2x-seat"
PYTHON = "/opt/kybernate/bin/python"
CONFIGURATION = 'seats.file = "/etc/kybernate/seats.yaml"\n'
SHIM_SETTINGS = "/etc/kybernate/shim.toml"
RUNTIME = 'runtime = "runc"\n'  # these lanes have no nvidia-container-runtime
SEATS = f"""
profiles:
  - {{name: gpu-1x-seat, resource: {ONE}, groupSize: 1, seatsPerGroup: 4}}
  - {{name: gpu-2x-seat, resource: {TWO}, groupSize: 2, seatsPerGroup: 3}}
gpuTopology:
  groups: [{{name: G0, gpus: [0]}}, {{name: G01, gpus: [0, 1]}}]
rules: {{minimumResidency: 0.2, slice: 1, yieldAfter: 0.1, idleAfter: 0, reserve: 8Mi, ramLow: 0, ramHigh: 0}}
"""


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[Node]:
    """The cluster's node with two pretended GPUs, one of which has seats of its own."""
    found = cluster.nodes[0]
    found.run("env", "-C", "/src", PYTHON, "-m", "tests.cluster.pretended_gpus", "install")
    places = [found.path(name) for name in (SETTINGS, SHIM_SETTINGS, "/etc/kybernate/seats.yaml")]
    before = [place.read_text() if place.exists() else None for place in places]
    for place, old, text in zip(places, before, (CONFIGURATION, RUNTIME, SEATS), strict=True):
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


def restarts(kubectl: Kubectl, name: str) -> int:
    (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
    return int(status["restartCount"]) if status["ready"] else -1

"""Programs of a node that end and come back while pods run, a node that reboots, and eviction. Of both handlers.

These tests disturb whatever else runs in the cluster, so they have one of their own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.leftovers import assert_nothing_left, snapshot
from tests.cluster.pods import container, deployment, pod
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

COUNTER = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done")


def counted(kubectl: Kubectl, name: str) -> int:
    return int((kubectl.logs(name, "--tail=1").split() or ["0"])[0])


@contextmanager
def counting_on(kubectl: Kubectl, name: str) -> Iterator[None]:
    """Have a pod count, and show after the block that the same container counts on, and is not restarted."""
    kubectl.ready(f"pod/{name}")
    assert eventually(lambda: counted(kubectl, name) > 3)
    before = kubectl.get("pod", name)["status"]["containerStatuses"][0]["containerID"]
    last = counted(kubectl, name)
    yield
    assert eventually(lambda: counted(kubectl, name) > last + 5, seconds=60)
    after = kubectl.get("pod", name)["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


def usable(kubectl: Kubectl, name: str) -> None:
    """Require that everything works with a pod that has lived through something."""
    kubectl.ready(f"pod/{name}")
    assert kubectl.exec(name, "echo", "still") == "still\n"


@pytest.mark.parametrize("program", ["kubelet", "containerd", "agent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_programs_of_the_node_restart_while_pods_run(
    kubectl: Kubectl, handler: str, cluster: Cluster, program: str, number: int
) -> None:
    node = cluster.nodes[0]
    kubectl.apply(pod("counter", *COUNTER, handler=handler, restartPolicy="Always"))
    with counting_on(kubectl, "counter"):
        getattr(node, program).restart(number)
        kubectl.wait("condition=Ready", f"node/{node.name}", seconds=120)
    usable(kubectl, "counter")
    kubectl.apply(pod("after", handler=handler))
    usable(kubectl, "after")


def test_pods_that_end_while_containerd_is_away_are_seen_afterwards(
    kubectl: Kubectl, handler: str, cluster: Cluster
) -> None:
    node = cluster.nodes[0]
    script = "while test ! -e /data/end; do sleep 0.1; done; exit 3"
    main = container("main", "sh", "-c", script, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    where = f"/tmp/away-{handler}"
    volumes = [{"name": "data", "hostPath": {"path": where, "type": "DirectoryOrCreate"}}]
    kubectl.apply(pod("ends", handler=handler, containers=[main], volumes=volumes))
    kubectl.ready("pod/ends")
    node.containerd.kill()
    node.path(f"{where}/end").touch()
    assert eventually(lambda: not node.run("pgrep", "-f", "data/end", check=False).split(), seconds=30)
    node.containerd.start()
    node.containerd.wait_ready()
    kubectl.phase("ends", "Failed", seconds=120)
    state = kubectl.get("pod", "ends")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert state["exitCode"] in (
        3,
        255,
    )  # containerd takes a shim without processes for a leftover, and asks it nothing


def rebooted(kubectl: Kubectl, node: Node) -> None:
    node.reboot()
    kubectl.wait("condition=Ready", f"node/{node.name}", seconds=180)


def test_node_that_reboots_has_its_pods_again(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    node = cluster.nodes[0]
    kubectl.apply(
        deployment("web", handler=handler, replicas=2),
        pod("always", handler=handler, restartPolicy="Always"),
        pod("never", handler=handler, restartPolicy="Never"),
    )
    kubectl.rolled_out("deployment/web")
    kubectl.ready("pod/always", "pod/never")
    rebooted(kubectl, node)
    restarted = lambda: kubectl.get("pod", "always")["status"]["containerStatuses"][0]["restartCount"] > 0  # noqa: E731
    assert eventually(restarted, seconds=180, pause=1)
    usable(kubectl, "always")
    kubectl.rolled_out("deployment/web", seconds=180)
    ended = lambda: kubectl.get("pod", "never")["status"]["phase"] in ("Failed", "Succeeded", "Unknown")  # noqa: E731
    assert eventually(ended, seconds=180, pause=1)
    kubectl.apply(pod("after", handler=handler))
    usable(kubectl, "after")


def test_drained_node_gives_up_its_pods_and_takes_new_ones(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    node = cluster.nodes[0]
    before = snapshot(node)
    kubectl.apply(deployment("web", handler=handler, replicas=3, terminationGracePeriodSeconds=1))
    kubectl.rolled_out("deployment/web")
    kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--pod-selector=app=web")
    try:
        assert eventually(lambda: all(one["status"]["phase"] == "Pending" for one in kubectl.items("pods")), seconds=60)
        kubectl("scale", "deployment/web", "--replicas=0")
        assert_nothing_left(node, before)
    finally:
        kubectl("uncordon", node.name)
    kubectl("scale", "deployment/web", "--replicas=1")
    kubectl.rolled_out("deployment/web")


def test_pod_that_outgrows_its_disk_is_evicted(kubectl: Kubectl, handler: str) -> None:
    """By kubelet, for the limit of its own ephemeral storage; what it wrote is measured by containerd's snapshotter."""
    limit = {"resources": {"limits": {"ephemeral-storage": "10Mi"}}}
    fills = "sleep 1; head -c 40000000 /dev/zero >/tmp/large; sleep 1000"
    kubectl.apply(pod("large", handler=handler, containers=[container("main", "sh", "-c", fills, **limit)]))
    kubectl.phase("large", "Failed", seconds=180)
    status = kubectl.get("pod", "large")["status"]
    assert status["reason"] == "Evicted"
    assert "ephemeral local storage" in status["message"]

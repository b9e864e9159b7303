"""Programs of the cluster are killed and restarted, and a node reboots, while pods run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import pod
from tests.lab.cluster.addresses import SECONDS
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"),
    *("containerd-node-1", "kubelet-node-1", "kube-proxy-node-1", "agent-node-1"),
)


@pytest.fixture(autouse=True)
def _everything_runs(cluster: Cluster) -> Iterator[None]:
    """Lest one failed test fails all that follow."""
    yield
    for daemon in cluster.daemons:
        if not daemon.alive():
            daemon.start()
    for daemon in cluster.daemons:
        daemon.wait_ready(seconds=SECONDS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_pod_outlives_a_program_that_is_killed(kubectl: Kubectl, cluster: Cluster, name: str) -> None:
    kubectl.apply(pod("before", handler="kybernate"))
    kubectl.ready("pod/before")
    (container,) = kubectl.get("pod", "before")["status"]["containerStatuses"]
    (daemon,) = (daemon for daemon in cluster.daemons if daemon.name == name)
    former = daemon.pid
    daemon.restart()
    assert daemon.pid != former
    kubectl.apply(pod("after", handler="kybernate"))
    kubectl.ready("pod/before", "pod/after")
    for one in ("before", "after"):
        assert kubectl.get("pod", one)["status"]["containerStatuses"][0]["restartCount"] == 0
        assert kubectl.exec(one, "hostname") == f"{one}\n"
    (same,) = kubectl.get("pod", "before")["status"]["containerStatuses"]
    assert same["containerID"] == container["containerID"]


def test_pods_start_again_after_a_reboot(kubectl: Kubectl, cluster: Cluster, handler: str) -> None:
    (node,) = cluster.nodes
    kubectl.apply(pod("one", handler=handler, restartPolicy="Always"))
    kubectl.ready("pod/one")
    before = kubectl.get("node", node.name)["status"]["nodeInfo"]["bootID"]
    node.reboot()

    def started_again() -> bool:
        (status,) = kubectl.get("pod", "one")["status"]["containerStatuses"]
        return bool(status["restartCount"] == 1 and status["ready"])

    eventually(started_again, seconds=90)
    assert kubectl.exec("one", "echo", "said") == "said\n"
    assert kubectl.get("node", node.name)["status"]["nodeInfo"]["bootID"] != before
    assert "Rebooted" in kubectl(
        "get", "events", "--all-namespaces", f"--field-selector=involvedObject.name={node.name}"
    )

"""The lane itself: pods of both handlers run, Services and names work, and each user may do what his role says."""

from __future__ import annotations

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import pod
from tests.lab.cluster.cluster import Cluster


def test_nodes_are_ready(administrator: Kubectl, cluster: Cluster) -> None:
    nodes = administrator.items("nodes")
    assert [node["metadata"]["name"] for node in nodes] == [node.name for node in cluster.nodes]
    administrator.wait("condition=Ready", *(f"node/{node.name}" for node in cluster.nodes))


def test_pod_runs_with_logs_and_exec(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("one", "sh", "-c", "echo written; sleep 1000", handler=handler))
    kubectl.ready("pod/one")
    assert kubectl.logs("one") == "written\n"
    assert kubectl.exec("one", "hostname") == "one\n"

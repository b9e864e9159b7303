"""Pods of several nodes reach each other by address, Service and name; those that name no class run under our handler.

The lab's largest cluster has three; the tests pass on two as well.
"""

from __future__ import annotations

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import deployment, pod, service
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

WEB = ("sh", "-c", "mkdir /www && hostname >/www/index.html && exec httpd -f -p 8080 -h /www")
SPREAD = {
    "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app": "web"}},
}  # fmt: skip


def test_cluster_has_more_than_one_node(cluster: Cluster) -> None:
    assert len(cluster.nodes) > 1, "the tests of this folder want --nodes 3"


def test_pods_of_all_nodes_serve_each_other(kubectl: Kubectl, cluster: Cluster) -> None:
    clients = [pod(node.name, nodeName=node.name) for node in cluster.nodes]
    web = deployment("web", *WEB, replicas=len(cluster.nodes), topologySpreadConstraints=[SPREAD])
    kubectl.apply(web, service("web", 80, 8080), *clients)
    kubectl.rolled_out("deployment/web")
    kubectl.ready(*(f"pod/{node.name}" for node in cluster.nodes))
    servers = {one["metadata"]["name"]: one for one in kubectl.items("pods", "-l", "app=web")}
    assert {one["spec"]["nodeName"] for one in servers.values()} == {node.name for node in cluster.nodes}
    for node in cluster.nodes:
        for name, server in servers.items():
            assert fetch(kubectl, node.name, f"http://{server['status']['podIP']}:8080") == name
        _all_answer(kubectl, node.name, set(servers))


def _all_answer(kubectl: Kubectl, client: str, servers: set[str]) -> None:
    answers: set[str] = set()

    def complete() -> bool:
        answers.add(fetch(kubectl, client, f"http://web.{kubectl.namespace}.svc.cluster.local"))
        return answers == servers

    eventually(complete)


def fetch(kubectl: Kubectl, client: str, url: str) -> str:
    return kubectl.exec(client, "wget", "-T", "5", "-qO-", url).strip()


def test_pod_that_names_no_class_runs_under_our_handler(kubectl: Kubectl, cluster: Cluster) -> None:
    assert cluster.default_runtime == "kybernate"
    kubectl.apply(*(pod(node.name, nodeName=node.name) for node in cluster.nodes))
    kubectl.ready(*(f"pod/{node.name}" for node in cluster.nodes))
    for node in cluster.nodes:
        assert f"{kubectl.namespace}/{node.name}" in node.run("kybernate", "ps")


def test_node_that_reboots_leaves_the_others_alone(kubectl: Kubectl, cluster: Cluster) -> None:
    kubectl.apply(*(pod(node.name, nodeName=node.name, restartPolicy="Always") for node in cluster.nodes))
    kubectl.ready(*(f"pod/{node.name}" for node in cluster.nodes))
    first, *others = cluster.nodes
    first.reboot()

    def restarts(name: str) -> int:
        (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
        return int(status["restartCount"]) if status["ready"] else -1

    eventually(lambda: restarts(first.name) == 1, seconds=90)
    assert [restarts(node.name) for node in others] == [0] * len(others)
    for node in cluster.nodes:
        assert kubectl.exec(node.name, "echo", "said") == "said\n"

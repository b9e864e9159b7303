"""Many pods together and one after the other, of both handlers: all run, and nothing of them is left on the node.

KYBERNATE_SCALE=full has as many as a node is asked for in production; without it, this takes seconds.
"""

from __future__ import annotations

import os

from tests.cluster.kubectl import Kubectl
from tests.cluster.leftovers import assert_nothing_left, snapshot
from tests.cluster.pods import FOREVER, container, deployment, pod
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

FULL = os.environ.get("KYBERNATE_SCALE") == "full"
AT_ONCE, MANY, TIMES, CONTAINERS = (60, 30, 5, 20) if FULL else (20, 10, 2, 6)
QUICK = {"terminationGracePeriodSeconds": 1}


def test_many_pods_come_and_go_and_leave_nothing(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    (node, *_) = cluster.nodes
    kubectl.apply(pod("first", handler=handler, **QUICK))
    kubectl.ready("pod/first")  # what the first pod of a node makes stays: the bridge, the fork server
    kubectl.delete("pod/first")
    before = snapshot(node)
    kubectl.apply(deployment("many", handler=handler, replicas=0, **QUICK))
    for _ in range(TIMES):
        kubectl("scale", "deployment/many", f"--replicas={MANY}")
        kubectl.rolled_out("deployment/many", seconds=300)
        kubectl("scale", "deployment/many", "--replicas=0")
        assert eventually(lambda: not kubectl.items("pods"), seconds=300, pause=0.5)
    assert_nothing_left(node, before)


def test_many_pods_at_once(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    """Half of them run, and half run to their end."""
    (node, *_) = cluster.nodes
    names = [f"pod-{number}" for number in range(AT_ONCE)]
    running, ending = names[::2], names[1::2]
    before = snapshot(node)
    kubectl.apply(
        *(pod(name, handler=handler, **QUICK) for name in running),
        *(pod(name, "sh", "-c", "echo said", handler=handler, **QUICK) for name in ending),
    )
    kubectl.ready(*(f"pod/{name}" for name in running), seconds=300)
    kubectl.wait("jsonpath={.status.phase}=Succeeded", *(f"pod/{name}" for name in ending), seconds=300)
    assert {kubectl.logs(name) for name in ending[::5]} == {"said\n"}
    kubectl.delete("pods", "--all")
    assert_nothing_left(node, before)


def test_pod_of_many_containers_leaves_nothing(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    (node, *_) = cluster.nodes
    before = snapshot(node)
    names = [f"c{number}" for number in range(CONTAINERS)]
    inside = [container(name, "sh", "-c", f"echo {name}; {FOREVER[-1]}") for name in names]
    kubectl.apply(pod("many", handler=handler, containers=inside, **QUICK))
    kubectl.ready("pod/many", seconds=300)
    assert [kubectl.logs("many", "-c", name) for name in names] == [f"{name}\n" for name in names]
    kubectl.delete("pod/many")
    assert_nothing_left(node, before)

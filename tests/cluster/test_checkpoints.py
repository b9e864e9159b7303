"""Checkpoints of pods under a real kubelet."""

from __future__ import annotations

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import pod
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

COUNTER = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done")
FROM = "kybernate.io/restore-from"


def last(kubectl: Kubectl, name: str) -> int:
    return int((kubectl.logs(name, "--tail=1").split() or ["0"])[0])


def test_pod_resumes_where_another_one_stopped(kubectl: Kubectl, cluster: Cluster) -> None:
    (node, *_) = cluster.nodes
    kubectl.apply(pod("first", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "first") > 5)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/first", "kept", "--exit")
    stopped = last(kubectl, "first")
    kubectl.phase("first", "Failed")
    kubectl.apply(pod("second", "/never/run", handler="kybernate", annotations={FROM: "kept"}))
    kubectl.ready("pod/second")
    assert eventually(lambda: last(kubectl, "second") > stopped + 5)
    assert int(kubectl.logs("second").split()[0]) == stopped + 1
    assert kubectl.exec("second", "hostname") == "second\n"


def test_pod_with_users_of_its_own_is_not_ended_for_an_image_that_cannot_be_restored(
    kubectl: Kubectl, cluster: Cluster
) -> None:
    (node, *_) = cluster.nodes
    kubectl.apply(pod("users", *COUNTER, handler="kybernate", hostUsers=False))
    assert eventually(lambda: last(kubectl, "users") > 1)
    said = node.run("sh", "-c", f"kybernate checkpoint {kubectl.namespace}/users lost --exit 2>&1 || true")
    assert "shares the user namespace of its pod" in said
    before = last(kubectl, "users")
    assert eventually(lambda: last(kubectl, "users") > before + 3)
    assert kubectl.get("pod", "users")["status"]["phase"] == "Running"

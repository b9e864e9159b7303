"""Programs of a node that end and come back while pods run, a node that reboots, and eviction. Of both handlers.

These tests disturb whatever else runs in the cluster, so they have one of their own.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import OURS, STOCK
from tests.cluster.kubectl import Kubectl
from tests.cluster.leftovers import assert_nothing_left, snapshot
from tests.cluster.pods import container, deployment, pod
from tests.cluster.test_scale import FULL
from tests.lab.cluster.addresses import API, PKI
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.components import KUBELET_CONFIGURATION
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

BOTH = (OURS, STOCK)  # side by side, where a test waits long for what kubelet does with all of a node's pods
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
    kubectl.apply(pod("counter", *COUNTER, handler=handler, restartPolicy="Always"))
    with counting_on(kubectl, "counter"):
        node = cluster.node(kubectl.node("counter"))
        getattr(node, program).restart(number)
        kubectl.wait("condition=Ready", f"node/{node.name}", seconds=120)
    usable(kubectl, "counter")
    kubectl.apply(pod("after", handler=handler, nodeName=node.name))
    usable(kubectl, "after")


def how(kubectl: Kubectl, name: str) -> tuple[int, str]:
    """Return the exit code and the reason with which the only container of a pod has ended."""
    (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
    ended = status["state"]["terminated"]
    return ended["exitCode"], ended["reason"]


def test_pods_that_end_while_containerd_is_away_are_seen_afterwards(kubectl: Kubectl, cluster: Cluster) -> None:
    """Side by side, as they see the same absence."""
    (node, *_) = cluster.nodes
    script = "while test ! -e /data/end; do sleep 0.1; done; exit 3"
    main = container("main", "sh", "-c", script, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    volumes = [{"name": "data", "hostPath": {"path": "/tmp/away", "type": "DirectoryOrCreate"}}]
    kubectl.apply(*(pod(name, handler=name, containers=[main], volumes=volumes, nodeName=node.name) for name in BOTH))
    kubectl.ready(*(f"pod/{name}" for name in BOTH))
    node.containerd.kill()
    node.path("/tmp/away/end").touch()
    assert eventually(lambda: not node.run("pgrep", "-f", "data/end", check=False).split(), seconds=30)
    node.containerd.start()
    node.containerd.wait_ready()
    for name in BOTH:
        kubectl.phase(name, "Failed", seconds=120)
    node.path("/tmp/away/end").unlink()
    # 255 of both: containerd takes a shim without processes for a leftover, and does not ask it for the 3.
    assert how(kubectl, OURS) == how(kubectl, STOCK)


def rebooted(kubectl: Kubectl, node: Node) -> None:
    node.reboot()
    kubectl.wait("condition=Ready", f"node/{node.name}", seconds=180)


def test_node_that_reboots_has_its_pods_again(kubectl: Kubectl, cluster: Cluster) -> None:
    """Side by side, as they see the same reboot."""
    (node, *_) = cluster.nodes
    names = {policy: [f"{policy.lower()}-{name}" for name in BOTH] for policy in ("Always", "Never")}
    kubectl.apply(
        *(deployment(f"web-{name}", handler=name, replicas=2) for name in BOTH),
        *(
            pod(f"{policy.lower()}-{name}", handler=name, restartPolicy=policy, nodeName=node.name)
            for policy in names
            for name in BOTH
        ),
    )
    for name in BOTH:
        kubectl.rolled_out(f"deployment/web-{name}")
    kubectl.ready(*(f"pod/{name}" for policy in names for name in names[policy]))
    rebooted(kubectl, node)
    for name in names["Always"]:
        restarted = lambda name=name: kubectl.get("pod", name)["status"]["containerStatuses"][0]["restartCount"] > 0  # noqa: E731
        assert eventually(restarted, seconds=180, pause=1)
        usable(kubectl, name)
    for name in BOTH:
        kubectl.rolled_out(f"deployment/web-{name}", seconds=180)
    for name in names["Never"]:
        ended = lambda name=name: kubectl.get("pod", name)["status"]["phase"] not in ("Pending", "Running")  # noqa: E731
        assert eventually(ended, seconds=180, pause=1)
    phases = [kubectl.get("pod", name)["status"]["phase"] for name in names["Never"]]
    assert phases == ["Failed", "Failed"]
    assert how(kubectl, names["Never"][0]) == how(kubectl, names["Never"][1])
    kubectl.apply(*(pod(f"after-{name}", handler=name, nodeName=node.name) for name in BOTH))
    for name in BOTH:
        usable(kubectl, f"after-{name}")


def test_drained_node_gives_up_its_pods_and_takes_new_ones(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    """The cluster has no other node that takes them."""
    before = {node.name: snapshot(node) for node in cluster.nodes}
    kubectl.apply(deployment("web", handler=handler, replicas=3, terminationGracePeriodSeconds=1))
    kubectl.rolled_out("deployment/web")
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--pod-selector=app=web")
    kubectl("drain", *before, *options)
    try:
        waiting = lambda: [one["status"]["phase"] for one in kubectl.items("pods")] == ["Pending"] * 3  # noqa: E731
        assert eventually(waiting, seconds=60)
        kubectl("scale", "deployment/web", "--replicas=0")
        for node in cluster.nodes:
            assert_nothing_left(node, before[node.name])
    finally:
        kubectl("uncordon", *before)
    kubectl("scale", "deployment/web", "--replicas=1")
    kubectl.rolled_out("deployment/web")


@contextmanager
def kubelet_with(kubectl: Kubectl, node: Node, **settings: Any) -> Iterator[None]:
    """Run the node's kubelet with other settings while the block runs."""
    file = node.path(KUBELET_CONFIGURATION)
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **settings}))
    try:
        node.kubelet.restart(signal.SIGTERM)
        yield
    finally:
        file.write_text(before)
        node.kubelet.restart(signal.SIGTERM)
    kubectl.wait("condition=MemoryPressure=false", f"node/{node.name}", seconds=120)
    kubectl.wait("condition=Ready", f"node/{node.name}", seconds=120)


def evicted(kubectl: Kubectl, name: str) -> str:
    """Wait until a pod is evicted, and return what kubelet says of it."""
    kubectl.phase(name, "Failed", seconds=180)
    status = kubectl.get("pod", name)["status"]
    assert status["reason"] == "Evicted"
    return str(status["message"])


def test_pod_that_outgrows_its_disk_or_a_volume_is_evicted(kubectl: Kubectl, cluster: Cluster) -> None:
    """By kubelet: what a container wrote is measured by containerd's snapshotter, what is in a volume by kubelet."""
    (node, *_) = cluster.nodes
    limit = {"resources": {"limits": {"ephemeral-storage": "10Mi"}}}
    fills = "sleep 1; head -c 40000000 /dev/zero >%s/large; sleep 1000"
    volume = {"volumes": [{"name": "data", "emptyDir": {"sizeLimit": "10Mi"}}], "nodeName": node.name}
    mounted = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    within = "head -c 4000000 /dev/zero >/data/small; sleep 1000"
    with kubelet_with(kubectl, node, volumeStatsAggPeriod="1s"):  # the lab's own one is long
        for name in BOTH:
            kubectl.apply(
                pod(f"disk-{name}", handler=name, containers=[container("main", "sh", "-c", fills % "/tmp", **limit)]),
                pod(f"volume-{name}", handler=name, **volume,
                    containers=[container("main", "sh", "-c", fills % "/data", **mounted)]),
                pod(f"within-{name}", handler=name, **volume,
                    containers=[container("main", "sh", "-c", within, **mounted, **limit)]),
            )  # fmt: skip
        for name in BOTH:
            assert "ephemeral local storage" in evicted(kubectl, f"disk-{name}")
            assert 'EmptyDir volume "data" exceeds the limit "10Mi"' in evicted(kubectl, f"volume-{name}")
        usable(kubectl, f"within-{OURS}")
        usable(kubectl, f"within-{STOCK}")


def test_pods_of_a_node_without_memory_are_evicted(kubectl: Kubectl, cluster: Cluster) -> None:
    """It has none by kubelet's own measure, of which nearly all must be free; the machine's is left alone."""
    (node, *_) = cluster.nodes
    # The restarted kubelet refuses a pod without a request; one whose program exits with 0 at SIGTERM may succeed.
    main = container("main", "sleep", "1000", resources={"requests": {"cpu": "1m"}})
    kubectl.apply(*(pod(name, handler=name, containers=[main], nodeName=node.name) for name in BOTH))
    kubectl.ready(*(f"pod/{name}" for name in BOTH))
    none_left = json.loads(node.path(KUBELET_CONFIGURATION).read_text())["evictionHard"]
    none_left["memory.available"] = "99.9%"
    with kubelet_with(kubectl, node, evictionHard=none_left):
        for name in BOTH:
            assert "The node was low on resource: memory" in evicted(kubectl, name)
        kubectl.wait("condition=MemoryPressure", f"node/{node.name}", seconds=120)
        assert [how(kubectl, name)[0] for name in BOTH] == [137, 137]
    kubectl.apply(*(pod(f"after-{name}", handler=name) for name in BOTH))
    kubectl.ready(*(f"pod/after-{name}" for name in BOTH), seconds=120)


# kubelet renews a token when it has none in its memory, and by itself after 80 % of its life of ten minutes at least.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cause", ["kubelet restarts", *(["age"] if FULL else [])])
def test_token_rotates_in_the_running_pod(kubectl: Kubectl, cluster: Cluster, cause: str) -> None:
    (node, *_) = cluster.nodes
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}
    volumes = [{"name": "token", "projected": {"sources": [token]}}]
    main = container("main", volumeMounts=[{"name": "token", "mountPath": "/token"}])
    kubectl.apply(*(pod(name, handler=name, containers=[main], volumes=volumes, nodeName=node.name) for name in BOTH))
    kubectl.ready(*(f"pod/{name}" for name in BOTH))
    first = {name: credential(kubectl, name) for name in BOTH}
    if cause == "kubelet restarts":
        node.kubelet.restart()
    for name in BOTH:
        assert eventually(lambda name=name: credential(kubectl, name) != first[name], seconds=700, pause=1)
        assert kubectl.get("pod", name)["status"]["containerStatuses"][0]["restartCount"] == 0


def credential(kubectl: Kubectl, name: str) -> str:
    """Return the id of the token that a pod's container reads, as the API server knows it, which must accept it."""
    token = kubectl.exec(name, "cat", "/token/token")
    caller = Kubectl(kubectl.namespace, Path("/dev/null"))  # with nothing but the token
    where = (f"--server={API}", f"--certificate-authority={PKI}/ca.crt", f"--token={token}")
    user = json.loads(caller("auth", "whoami", *where, "-o", "json"))["status"]["userInfo"]
    assert user["username"] == f"system:serviceaccount:{kubectl.namespace}:default"
    assert user["extra"]["authentication.kubernetes.io/pod-name"] == [name]
    (found,) = user["extra"]["authentication.kubernetes.io/credential-id"]
    return str(found)

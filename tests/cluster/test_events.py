"""What happens to a pod can be read in its events, and the agent does not depend on being able to write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster import leftovers
from tests.cluster.in_cluster import MANIFESTS, NAMESPACE, access
from tests.cluster.kubectl import Kubectl, last
from tests.cluster.pod_events import events_of, wait_for
from tests.cluster.pods import RESTRICTED, container, pod
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

COUNTER = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done")
FROM = "kybernate.io/restore-from"


@pytest.fixture(scope="module")
def node(cluster: Cluster, administrator: Kubectl) -> Iterator[Node]:
    """The node, whose agent has access to the API server."""
    (found,) = cluster.nodes
    with access(administrator, found):
        yield found


def logged(node: Node, event: str, since: int = 0) -> list[str]:
    """Return the lines of the agent's log with that event, after the first `since` lines."""
    lines = node.agent.log.read_text().splitlines()[since:]
    return [line for line in lines if line.startswith("{") and json.loads(line).get("event") == event]


def test_life_of_a_pod_reads_as_a_story(kubectl: Kubectl, node: Node) -> None:
    main = container("main", *COUNTER, **RESTRICTED)
    kubectl.apply(pod("first", handler="kybernate", containers=[main]))
    assert eventually(lambda: last(kubectl, "first") > 3)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/first", "story")
    done = wait_for(kubectl, "first", "Checkpointed")
    assert re.fullmatch(r"Wrote image story: [\d.]+ [KM]iB in [\d.]+ s, frozen for [\d.]+ s", done.message)
    assert [one.reason for one in events_of(kubectl, "first")] == ["Checkpointing", "Checkpointed"]
    assert (done.type, done.field) == ("Normal", "spec.containers{main}")
    kubectl.delete("pod/first")
    main["command"] = ["/never/run"]
    kubectl.apply(pod("second", handler="kybernate", containers=[main], annotations={FROM: "story"}))
    kubectl.ready("pod/second")
    wait_for(kubectl, "second", "Restored")
    assert [one.reason for one in events_of(kubectl, "second")] == ["Restoring", "Restored"]
    described = kubectl("describe", "pod", "second")
    assert "Restored the container from image story" in described
    assert "/var/lib/kybernate" not in described


def test_checkpoint_that_fails_says_why_on_the_pod(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("hurried", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "hurried") > 1)
    node.run("sh", "-c", f"kybernate checkpoint {kubectl.namespace}/hurried lost --max-freeze 1ms || true")
    failed = wait_for(kubectl, "hurried", "CheckpointFailed")
    assert failed.type == "Warning"
    assert "freeze" in failed.message
    assert last(kubectl, "hurried") > 1


def test_refused_restore_shows_cause_and_remedy_backs_off_and_leaves_nothing(kubectl: Kubectl, node: Node) -> None:
    before = leftovers.snapshot(node)
    kubectl.apply(pod("refused", *COUNTER, handler="kybernate", annotations={FROM: "no-such"}, restartPolicy="Always"))

    def tried_again() -> bool:
        kubelets = events_of(kubectl, "refused", source="kubelet")
        return any(one.reason == "BackOff" for one in kubelets) and any(one.reason == "Failed" for one in kubelets)

    assert eventually(tried_again, seconds=90)
    described = kubectl("describe", "pod", "refused")
    assert "no-such" in described
    assert "no such directory" in described
    assert "Nothing was restored" in described
    (status,) = kubectl.get("pod", "refused")["status"]["containerStatuses"]
    (state,) = status["state"].values()
    assert state["reason"] in ("CrashLoopBackOff", "RunContainerError", "StartError")
    kubectl.delete("pod/refused")
    leftovers.assert_nothing_left(node, before)


def test_another_container_image_is_named_as_the_cause(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("source", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "source") > 1)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/source", "of-busybox")
    kubectl.apply(pod("other", *COUNTER, handler="kybernate", of="python", annotations={FROM: "of-busybox"}))
    failed = wait_for(kubectl, "other", "RestoreFailed")
    pattern = r"container image: the image was made with (\S+) \(sha256:\w+\), found here: (\S+)"
    found = re.search(pattern, failed.message)
    assert found is not None, failed
    assert ("busybox" in found[1], "python" in found[2]) == (True, True)
    assert found[0] in " ".join(kubectl("describe", "pod", "other").split())


def test_init_container_is_said_to_start_as_usual(kubectl: Kubectl, node: Node) -> None:
    kubectl.apply(pod("source", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "source") > 1)
    node.run("kybernate", "checkpoint", f"{kubectl.namespace}/source", "skipped")
    first = [container("setup", "sh", "-c", "true")]
    kubectl.apply(pod("restored", *COUNTER, handler="kybernate", annotations={FROM: "skipped"}, initContainers=first))
    skipped = wait_for(kubectl, "restored", "RestoreSkipped")
    assert (skipped.type, skipped.field) == ("Normal", "spec.initContainers{setup}")
    assert "image skipped is of container main, so setup is started as usual" in skipped.message
    wait_for(kubectl, "restored", "Restored")


def test_event_waits_for_an_api_server_that_is_away(kubectl: Kubectl, node: Node, cluster: Cluster) -> None:
    kubectl.apply(pod("waits", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "waits") > 1)
    cluster.api_server.kill()
    try:
        node.run("kybernate", "checkpoint", f"{kubectl.namespace}/waits", "unheard")
        eventually(lambda: logged(node, "kubernetes.lost"))
    finally:
        cluster.api_server.start()
        cluster.api_server.wait_ready(seconds=120)
    wait_for(kubectl, "waits", "Checkpointed", seconds=120)


def test_agent_without_the_right_says_so_once_and_works_on(
    kubectl: Kubectl, administrator: Kubectl, node: Node
) -> None:
    kubectl.apply(pod("silent", *COUNTER, handler="kybernate"))
    assert eventually(lambda: last(kubectl, "silent") > 1)
    administrator("delete", "clusterrolebinding", "kybernate-agent")
    since = len(node.agent.log.read_text().splitlines())
    try:
        node.agent.restart()
        for name in ("one", "two"):
            node.run("kybernate", "checkpoint", f"{kubectl.namespace}/silent", name)
        assert eventually(lambda: logged(node, "kubernetes.pods_refused", since))
        assert events_of(kubectl, "silent") == []
    finally:
        administrator.within(NAMESPACE).apply((MANIFESTS / "rbac.yaml").read_text())
    wait_for(kubectl, "silent", "Checkpointed", seconds=120)
    assert len(logged(node, "kubernetes.pods_refused", since)) == 1
    (refused,) = logged(node, "kubernetes.refused", since)
    assert "apply packaging/kubernetes/rbac.yaml" in refused
    node.agent.restart()  # which sees pods at its start


def test_account_may_neither_change_pods_nor_read_secrets(administrator: Kubectl, node: Node) -> None:
    who = ("--as", "system:serviceaccount:kybernate:kybernate-agent", "--all-namespaces")
    allowed: dict[tuple[str, ...], tuple[str, ...]] = {("pods",): ("list", "watch"), ("events",): ("create", "patch")}
    others = (("secrets",), ("nodes",), ("configmaps",), ("pods", "--subresource=exec"), ("pods", "--subresource=log"))
    for what in (*allowed, *others):
        for verb in ("get", "list", "watch", "create", "patch", "update", "delete"):
            words = ("auth", "can-i", verb, *what, *who)
            if verb in allowed.get(what, ()):
                assert "yes" in administrator(*words)
            else:
                assert administrator.refused(*words) == ""  # kubectl prints "no", and complains of nothing

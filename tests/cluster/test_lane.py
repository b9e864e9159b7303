"""The lane itself: pods of both handlers run, Services and names work, and each user may do what his role says."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, deployment, pod, service
from tests.lab.cluster.addresses import KUBELET_PORT
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.components import ask
from tests.lab.cluster.manifests import USER as USER_NAME
from tests.system.ctr import eventually

WEB = ("sh", "-c", "mkdir /www && hostname >/www/index.html && exec httpd -f -p 8080 -h /www")


def test_nodes_are_ready(administrator: Kubectl, cluster: Cluster) -> None:
    nodes = administrator.items("nodes")
    assert [node["metadata"]["name"] for node in nodes] == [node.name for node in cluster.nodes]
    administrator.wait("condition=Ready", *(f"node/{node.name}" for node in cluster.nodes))


def test_pod_runs_with_logs_and_exec(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(pod("one", "sh", "-c", "echo written; sleep 1000", handler=handler))
    kubectl.ready("pod/one")
    assert kubectl.logs("one") == "written\n"
    assert kubectl.exec("one", "hostname") == "one\n"


def test_pod_of_our_class_alone_is_known_to_kybernate(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    kubectl.apply(pod("one", handler=handler))
    kubectl.ready("pod/one")
    known = cluster.node(kubectl.node("one")).run("kybernate", "ps")
    assert (f"{kubectl.namespace}/one" in known) == (handler == "kybernate")


def test_service_reaches_pods_by_its_name(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(deployment("web", *WEB, replicas=2, handler=handler), service("web", 80, 8080), pod("client"))
    kubectl.rolled_out("deployment/web")
    kubectl.ready("pod/client")
    names = {one["metadata"]["name"] for one in kubectl.items("pods", "-l", "app=web")}
    answers: set[str] = set()

    def all_have_answered() -> bool:
        answers.add(kubectl.exec("client", "wget", "-T", "5", "-qO-", f"http://web.{kubectl.namespace}").strip())
        return answers == names

    eventually(all_have_answered)
    one = min(names)  # a pod of the Service, which asks it as any other client does
    assert kubectl.exec(one, "wget", "-T", "5", "-qO-", "http://web").strip() in names


def test_volumes_of_kubelet_are_seen_in_the_pod(kubectl: Kubectl, handler: str) -> None:
    kubectl("create", "secret", "generic", "word", "--from-literal=word=open")
    mounts = [{"name": "word", "mountPath": "/word"}, {"name": "memory", "mountPath": "/memory"}]
    volumes = [{"name": "word", "secret": {"secretName": "word"}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}]
    kubectl.apply(pod("one", handler=handler, containers=[container("main", volumeMounts=mounts)], volumes=volumes))
    kubectl.ready("pod/one")
    assert kubectl.exec("one", "cat", "/word/word") == "open"
    assert "tmpfs" in kubectl.exec("one", "stat", "-f", "-c", "%T", "/memory")


def test_pod_has_users_of_its_own(kubectl: Kubectl, cluster: Cluster, handler: str) -> None:
    handlers = kubectl.get("node", "node-1")["status"].get("runtimeHandlers", [])
    offering = {one["name"] for one in handlers if one.get("features", {}).get("userNamespaces")}
    kubectl.apply(pod("one", handler=handler, hostUsers=False))
    if cluster.lane == "cluster-trixie":  # containerd 1.7 says nothing of its runtimes
        assert not offering
        eventually(lambda: f'"{handler}" does not support user namespaces' in kubectl.events())
        return
    assert handler in offering
    kubectl.ready("pod/one")
    first, outside, count = kubectl.exec("one", "cat", "/proc/self/uid_map").split()
    assert (first, count) == ("0", "65536")
    assert outside != "0"


def test_plain_user_works_in_his_namespaces(user: Kubectl, handler: str) -> None:
    user.apply(pod("one", "sh", "-c", "echo written; sleep 1000", handler=handler))
    user.ready("pod/one")
    assert user.logs("one") == "written\n"
    assert user.exec("one", "echo", "said") == "said\n"
    assert user.within(USER_NAME)("auth", "can-i", "create", "pods").strip() == "yes"


@pytest.mark.parametrize(
    "words",
    [
        ("get", "secrets", "--namespace=kube-system"),
        ("get", "pods", "--all-namespaces"),
        ("get", "nodes"),
        ("create", "-f", "/src/runtimeclass/kybernate.yaml"),
        ("get", "--raw", "/api/v1/nodes/node-1/proxy/pods"),
    ],
    ids=["secrets", "pods", "nodes", "classes", "kubelet"],
)
def test_plain_user_is_refused_what_is_not_his(user: Kubectl, words: tuple[str, ...]) -> None:
    assert "Forbidden" in user.refused(*words)


def test_checkpoint_of_kubelet_is_the_administrators(user: Kubectl, kubectl: Kubectl, cluster: Cluster) -> None:
    user.apply(pod("one"))
    user.ready("pod/one")
    node = cluster.node(kubectl.node("one"))
    path = f"/checkpoint/{kubectl.namespace}/one/main"
    assert ask(node.address, KUBELET_PORT, "POST", path, "user")[0] == HTTPStatus.FORBIDDEN
    assert "Forbidden" in user.refused("create", "--raw", f"/api/v1/nodes/{node.name}/proxy{path}", "-f", "/dev/null")


def test_kubelet_knows_its_callers(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    assert ask(node.address, KUBELET_PORT, "GET", "/pods")[0] == HTTPStatus.UNAUTHORIZED
    assert ask(node.address, KUBELET_PORT, "GET", "/pods", "user")[0] == HTTPStatus.FORBIDDEN
    status, answer = ask(node.address, KUBELET_PORT, "GET", "/pods", "admin")
    assert status == HTTPStatus.OK
    assert json.loads(answer)["kind"] == "PodList"

"""The kubelet's checkpoint API: who may use it, and a pod from its archive."""

from __future__ import annotations

import json
import ssl
import urllib.request
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.cluster.kubectl import Kubectl, last
from tests.cluster.pods import RESTRICTED, container, pod
from tests.cluster.test_checkpoints import FROM
from tests.lab.cluster.addresses import KUBELET_PORT, PKI
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

RBAC = "rbac.authorization.k8s.io"
ROLE = {
    "apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": "checkpoints"},
    "rules": [{"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]}],
}  # fmt: skip
COUNTER = "echo kept > /tmp/kept; i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"


def account(kubectl: Kubectl, name: str, *, may: bool) -> str:
    """Make a service account, give it the right to checkpoint or not, and return a token of it."""
    kubectl.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    if may:
        subject = {"kind": "ServiceAccount", "name": name, "namespace": kubectl.namespace}
        reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "checkpoints"}
        metadata = {"name": f"{kubectl.namespace}-{name}"}
        kubectl.apply(ROLE, {
            "apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": metadata, "roleRef": reference,
            "subjects": [subject],
        })  # fmt: skip
    return kubectl("create", "token", name).strip()


def ask(node: Node, path: str, token: str) -> Any:
    """Call the kubelet. Raises HTTPError."""
    url = f"https://{node.address}:{KUBELET_PORT}/checkpoint/{path}"
    request = urllib.request.Request(url, method="POST", headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(PKI / "ca.crt"))
    with urllib.request.urlopen(request, context=context, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("fields", [{}, RESTRICTED], ids=["root", "user"])
def test_pod_resumes_from_the_kubelets_archive(kubectl: Kubectl, cluster: Cluster, fields: dict[str, Any]) -> None:
    (node, *_) = cluster.nodes
    main = container("main", "sh", "-c", COUNTER, **fields)
    kubectl.apply(pod("first", handler="kybernate", containers=[main]))
    assert eventually(lambda: last(kubectl, "first") > 5)
    path = f"{kubectl.namespace}/first/main"
    with pytest.raises(HTTPError) as refused:
        ask(node, path, account(kubectl, "stranger", may=False))
    assert refused.value.code == HTTPStatus.FORBIDDEN
    (archive,) = eventually(lambda: ask(node, path, account(kubectl, "keeper", may=True)))["items"]
    counted = last(kubectl, "first")
    shown = json.loads(node.run("kybernate", "inspect", archive, "--json"))
    assert shown["manifest"]["source"]["pod"] == "first"
    found = json.loads(node.run("kybernate", "inspect", archive, "--verify", "--json", check=False))["problems"]
    assert [one["kind"] for one in found] == ["signature"], "containerd's own files are under no signature"
    node.run("kybernate", "import", archive, "kept", "--namespace", kubectl.namespace, "--yes")
    kubectl.delete("pod/first")
    main["command"] = ["/never/run"]
    kubectl.apply(pod("second", handler="kybernate", containers=[main], annotations={FROM: "kept"}))
    kubectl.ready("pod/second")
    assert eventually(lambda: last(kubectl, "second") > counted + 5)
    assert 1 < int(kubectl.logs("second").split()[0]) <= counted + 1
    assert kubectl.exec("second", "cat", "/tmp/kept") == "kept\n"
    node.run("rm", archive)

"""Gives a node's agent its service account in the cluster, as docs/kubernetes.md says for an agent of systemd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.kubectl import Kubectl
from tests.lab.cluster.addresses import API, PKI
from tests.lab.cluster.nodes import Node
from tests.lab.namespaces import CHECKOUT

MANIFESTS = CHECKOUT / "packaging/kubernetes"
NAMESPACE, ACCOUNT = "kybernate", "kybernate-agent"
SETTINGS, KUBECONFIG, TOKEN = "/etc/kybernate/agent.toml", "/etc/kybernate/kubeconfig", "/etc/kybernate/token"


@contextmanager
def access(administrator: Kubectl, node: Node) -> Iterator[None]:
    """Let the node's agent call the API server while the block runs."""
    own = administrator.within(NAMESPACE)
    own.apply((MANIFESTS / "rbac.yaml").read_text())
    own.wait("create", f"serviceaccount/{ACCOUNT}")
    token = own("create", "token", ACCOUNT)
    config = {
        "current-context": "node",
        "contexts": [{"name": "node", "context": {"cluster": "lab", "user": ACCOUNT}}],
        "clusters": [{"name": "lab", "cluster": {"server": API, "certificate-authority": str(PKI / "ca.crt")}}],
        "users": [{"name": ACCOUNT, "user": {"tokenFile": TOKEN}}],
    }
    node.path(TOKEN).write_text(token)
    node.path(KUBECONFIG).write_text(json.dumps(config))
    node.path(SETTINGS).write_text(f'[kubernetes]\nkubeconfig = "{KUBECONFIG}"\n')
    node.agent.restart()
    try:
        yield
    finally:
        for name in (SETTINGS, KUBECONFIG, TOKEN):
            node.path(name).unlink(missing_ok=True)
        if node.agent.alive():
            node.agent.restart()

"""What a cluster holds when it is ready: the project's RuntimeClass, the name server's Service, and who may do what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.lab.cluster.addresses import CONTROL_PLANE, DNS_SERVICE

USER = "alice"  # a plain user, who has a namespace of the same name
RUNTIME_CLASS = "runtimeclass/kybernate.yaml"
RBAC = "rbac.authorization.k8s.io"
# containerd's own runtime by name, for those who compare, whatever the default is.
STOCK = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "runc"}, "handler": "runc"}


def all_objects() -> str:
    """Return everything but the RuntimeClass as one List, which kubectl reads."""
    return json.dumps(
        {"apiVersion": "v1", "kind": "List", "items": [STOCK, *_user(), *_kubelet_client(), *_name_server()]}
    )


def runtime_class(checkout: Path) -> str:
    """Return the project's own RuntimeClass."""
    return (checkout / RUNTIME_CLASS).read_text()


def binding(kind: str, name: str, role: str, user: str, namespace: str = "") -> dict[str, Any]:
    """Return the RoleBinding or ClusterRoleBinding that gives a ClusterRole to a user."""
    return {
        "apiVersion": f"{RBAC}/v1", "kind": kind,
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }  # fmt: skip


def _user() -> list[dict[str, Any]]:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": USER}}
    return [namespace, binding("RoleBinding", USER, "edit", USER, USER)]


def _kubelet_client() -> list[dict[str, Any]]:
    """The API server's own identity, as which it calls the kubelets."""
    return [binding("ClusterRoleBinding", "kubelet-client", "system:kubelet-api-admin", "kubelet-client")]


def _name_server() -> list[dict[str, Any]]:
    """The Service in front of CoreDNS, which is a program of the control plane and not a pod."""
    ports = [{"name": f"dns-{protocol.lower()}", "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    role = {
        "apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": "coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"],
             "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }  # fmt: skip
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
    }  # fmt: skip
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "ports": ports,
        "metadata": {
            "name": "kube-dns-1", "namespace": "kube-system", "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "endpoints": [{"addresses": [CONTROL_PLANE], "conditions": {"ready": True}}],
    }  # fmt: skip
    return [role, binding("ClusterRoleBinding", "coredns", "coredns", "coredns"), service, endpoints]

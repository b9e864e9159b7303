"""Objects of the tests, as short as their subject allows."""

from __future__ import annotations

from typing import Any

from tests.lab.oci import REGISTRY

FOREVER = ("sh", "-c", "trap 'exit 0' TERM; while true; do sleep 1 & wait; done")  # ends immediately at SIGTERM
# Of a container: a user's, as a namespace admits it that enforces Kubernetes' Pod Security Standard "restricted".
RESTRICTED: dict[str, Any] = {
    "securityContext": {
        "runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True, "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }
}  # fmt: skip


def image(name: str = "busybox") -> str:
    """Return the reference of one of the lab's images: busybox, pause or python."""
    return f"{REGISTRY}/{name}:latest"


def container(name: str, *command: str, of: str = "busybox", **fields: Any) -> dict[str, Any]:
    """Return a container of image `of`; without a command it runs until it is asked to end."""
    return {
        "name": name, "image": image(of), "imagePullPolicy": "IfNotPresent", "command": list(command or FOREVER),
        **fields,
    }  # fmt: skip


def pod(name: str, *command: str, handler: str = "", containers: list[dict[str, Any]] | None = None,
        labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None, of: str = "busybox",
        **spec: Any) -> dict[str, Any]:  # fmt: skip
    """Return a pod of `containers`, or of one named "main" that runs `command`; `spec` has further fields.

    `handler`: the RuntimeClass, or "" for the default one. A pod that ends stays ended, unless `spec` says otherwise.
    """
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {"app": name}, "annotations": annotations or {}},
        "spec": pod_spec(*command, handler=handler, containers=containers, of=of, **{"restartPolicy": "Never", **spec}),
    }  # fmt: skip


def pod_spec(*command: str, handler: str = "", containers: list[dict[str, Any]] | None = None, of: str = "busybox",
             **spec: Any) -> dict[str, Any]:  # fmt: skip
    """Return the spec of such a pod."""
    chosen = {"runtimeClassName": handler} if handler else {}
    return {**chosen, "containers": containers or [container("main", *command, of=of)], **spec}


def deployment(name: str, *command: str, replicas: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a Deployment of such pods."""
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(*command, **fields)},
        },
    }  # fmt: skip


def service(name: str, port: int, target: int = 0, **spec: Any) -> dict[str, Any]:
    """Return a Service in front of the pods with the label app=NAME."""
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": port, "targetPort": target or port}], **spec},
    }  # fmt: skip

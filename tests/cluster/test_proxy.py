"""A Service whose endpoint is the proxy on the node: its requests wake a frozen pod, and kubelet's probes do not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

HTTP, TCP, SERVED = 18080, 18081, 8080
PROBES = 5  # of each kind, that the frozen pod must have had
SERVE = f"echo -n awake > /tmp/index.html; exec busybox httpd -f -p {SERVED} -h /tmp"
PID = "/run/test-proxy.pid"


def service_to(address: str) -> list[dict[str, Any]]:
    """Return a Service without a selector, and its endpoint at `address`, which is the proxy's."""
    metadata = {"name": "web"}
    port = {"name": "http", "port": 80, "protocol": "TCP"}
    labels = {"kubernetes.io/service-name": "web", "endpointslice.kubernetes.io/managed-by": "test.kybernate.io"}
    endpoint = {"addresses": [address], "conditions": {"ready": True}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"ports": [{**port, "targetPort": HTTP}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "web-1", "labels": labels},
         "addressType": "IPv4", "ports": [{"name": "http", "port": HTTP, "protocol": "TCP"}], "endpoints": [endpoint]},
    ]  # fmt: skip


def web(address: str) -> dict[str, Any]:
    """Return a pod with a web server whose probes are asked of the proxy at `address`."""
    http = {"httpGet": {"host": address, "port": HTTP, "path": "/healthz"}, "periodSeconds": 1, "timeoutSeconds": 5}
    tcp = {"tcpSocket": {"host": address, "port": TCP}, "periodSeconds": 1, "timeoutSeconds": 5}
    one = container(
        "main", "sh", "-c", SERVE, startupProbe={**http, "failureThreshold": 90}, livenessProbe=http, readinessProbe=tcp
    )
    return pod("web", handler="kybernate", containers=[one], restartPolicy="Always")


@contextmanager
def proxying(node: Node, namespace: str, upstream: str) -> Iterator[None]:
    """Run the proxy on the node, as a service of its would."""
    settings = f"""
listen: 0.0.0.0:{HTTP}
admin: 127.0.0.1:19464
access_log: /run/test-proxy.jsonl
models:
  web:
    container: {namespace}/web
    upstream: http://{upstream}:{SERVED}
    idle: 1s
    probes: [{{path: /healthz, body: asleep}}]
routes: [{{to: web}}]
tcp: [{{listen: 0.0.0.0:{TCP}, to: web, wake_on: data}}]
"""
    node.path("/run/test-proxy.yaml").write_text(settings)
    script = f"echo $$ > {PID}; exec kybernate proxy --config /run/test-proxy.yaml"
    with node.path("/run/test-proxy.log").open("wb") as log:
        process = subprocess.Popen([node.name, "sh", "-c", script], stdout=log, stderr=log)
    try:
        eventually(lambda: "proxy.started" in node.path("/run/test-proxy.log").read_text(), seconds=60)
        yield
    finally:
        node.run("sh", "-c", f"kill $(cat {PID})", check=False)
        process.wait(60)
        print(node.path("/run/test-proxy.log").read_text()[-3000:])
        node.run("sh", "-c", "rm -f /run/test-proxy.*")


def state(kubectl: Kubectl, node: Node) -> str:
    """Return the state of the pod's container as containerd has it."""
    id = str(kubectl.get("pod", "web")["status"]["containerStatuses"][0]["containerID"]).removeprefix("containerd://")
    rows = [line.split() for line in node.run("ctr", "-n", "k8s.io", "task", "ls").splitlines()]
    return next((row[2] for row in rows if row[0] == id), "")


def probes(node: Node) -> int:
    """Return how many of kubelet's HTTP probes the proxy has had."""
    return node.path("/run/test-proxy.jsonl").read_text().count("/healthz")


def test_request_to_a_service_wakes_a_frozen_pod_whose_probes_are_answered(kubectl: Kubectl, cluster: Cluster) -> None:
    (node,) = cluster.nodes
    kubectl.apply(web(node.address), pod("client", handler="runc"), *service_to(node.address))
    address = eventually(lambda: kubectl.get("pod", "web")["status"].get("podIP"), seconds=60)
    with proxying(node, kubectl.namespace, str(address)):
        kubectl.ready("pod/web", "pod/client", seconds=90)
        asked = ("wget", "-q", "-O", "-", "-T", "30", "http://web/index.html")
        for _ in range(2):
            assert eventually(lambda: state(kubectl, node) == "PAUSED", seconds=60, pause=0.3)
            before = probes(node)
            assert eventually(lambda before=before: probes(node) >= before + PROBES, seconds=60, pause=0.3)
            assert state(kubectl, node) == "PAUSED"
            assert kubectl.exec("client", *asked).strip() == "awake"
        status = kubectl.get("pod", "web")["status"]
        assert status["containerStatuses"][0]["restartCount"] == 0
        assert {one["type"]: one["status"] for one in status["conditions"]}["Ready"] == "True"
        assert "Liveness probe failed" not in kubectl.events()
        assert "Readiness probe failed" not in kubectl.events()
    node.run("kybernate", "wake", f"{kubectl.namespace}/web")  # so that it ends as others do

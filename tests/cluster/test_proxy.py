"""A Service whose endpoint is a node's proxy, which answers kubelet's probes of a pod that sleeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, pod, service
from tests.cluster.test_probes import restarts
from tests.lab.cluster.addresses import SECONDS
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.machine import InNode
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

DIRECTORY = "/etc/kybernate"
DOOR, ADMIN, TCP_DOOR = 18080, 19464, 18081  # the proxy's ports
OFTEN = {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 1}
# Counts the requests that it answers, and those of probes.
SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    answered = 0
    def do_GET(self):
        Handler.answered += self.path == "/work"
        content = b"%s %d" % (self.path.encode(), Handler.answered)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *words):
        pass
ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""


@dataclass
class Proxied:
    """A pod `qwen`, and the proxy of its node, which is what the Service `model` leads to."""

    kubectl: Kubectl
    node: Node

    def state(self) -> str:
        """Return the task's state by containerd: PAUSED while it sleeps."""
        id = self.kubectl.get("pod", "qwen")["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        rows = (line.split() for line in self.node.run("ctr", "-n", "k8s.io", "task", "ls").splitlines())
        return next((row[2] for row in rows if row[0] == id), "")

    def sleeps(self) -> None:
        eventually(lambda: self.state() == "PAUSED", seconds=SECONDS)

    def is_ready(self) -> bool:
        conditions = self.kubectl.get("pod", "qwen")["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def access(self) -> list[dict[str, Any]]:
        """Return the lines of the proxy's access log."""
        return [json.loads(line) for line in self.node.run("cat", f"{DIRECTORY}/access.jsonl").splitlines()]

    def probes(self, status: int) -> int:
        """Return how many of kubelet's probes have had this answer."""
        return sum(one["path"] == "/healthz" and one["status"] == status for one in self.access())

    def has_probes(self, status: int, count: int) -> bool:
        return self.probes(status) >= count

    def ask(self) -> str:
        """Ask the Service, from another pod."""
        address = self.kubectl.get("service", "model")["spec"]["clusterIP"]
        return self.kubectl.exec("client", "wget", "-q", "-T", "60", "-O", "-", f"http://{address}/work")


Start = Callable[..., Any]


@pytest.fixture
def proxied(cluster: Cluster, kubectl: Kubectl) -> Start:
    """Start both, the pod with these probes of kubelet's; asleep, the proxy answers HTTP's with `status`."""

    @contextmanager
    def start(status: int, **probes: Any) -> Iterator[Proxied]:
        node = cluster.nodes[0]
        kubectl.apply(service("qwen", 8080, publishNotReadyAddresses=True), *front(node.address))
        address = kubectl.get("service", "qwen")["spec"]["clusterIP"]
        node.path(f"{DIRECTORY}/proxy.yaml").write_text(settings(kubectl.namespace, f"http://{address}:8080", status))
        proxy = InNode(
            f"proxy-{node.name}", ("/opt/kybernate/bin/kybernate", "proxy"), (DOOR, TCP_DOOR), node.machine.into,
            node.machine,
        )  # fmt: skip
        proxy.start()
        try:
            proxy.wait_ready(seconds=SECONDS)
            main = container("main", "python3", "-c", SERVER, of="python", **probes)
            kubectl.apply(pod("qwen", handler="kybernate", containers=[main], restartPolicy="Always"))
            kubectl.apply(pod("client", handler="runc"))
            kubectl.ready("pod/client")
            found = Proxied(kubectl, node)
            found.sleeps()
            yield found
        finally:
            print(proxy.tail(60))
            proxy.kill()
            for name in ("proxy.yaml", "access.jsonl"):
                node.path(f"{DIRECTORY}/{name}").unlink(missing_ok=True)

    return start


def front(address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Service without a selector, and its endpoint: the proxy of a node."""
    slice = {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "model-proxy", "labels": {"kubernetes.io/service-name": "model"}},
        "ports": [{"port": DOOR, "protocol": "TCP"}], "endpoints": [{"addresses": [address]}],
    }  # fmt: skip
    return service("model", 80, DOOR, selector=None), slice


def settings(namespace: str, upstream: str, status: int) -> str:
    probe = f"{{path: /healthz, status: {status}, body: asleep}}"
    model = f"container: {namespace}/qwen, upstream: '{upstream}', idle: 1s, probes: [{probe}]"
    return (
        f"listen: 0.0.0.0:{DOOR}\nadmin: 127.0.0.1:{ADMIN}\naccess_log: {DIRECTORY}/access.jsonl\n"
        f"models: {{qwen: {{{model}}}}}\nroutes: [{{to: qwen}}]\n"
        f"tcp: [{{listen: '0.0.0.0:{TCP_DOOR}', to: qwen, wake_on: data}}]\n"
    )


def by_http(node: Node) -> dict[str, Any]:
    return {"httpGet": {"host": node.address, "port": DOOR, "path": "/healthz"}, **OFTEN}


def by_tcp(node: Node) -> dict[str, Any]:
    return {"tcpSocket": {"host": node.address, "port": TCP_DOOR}, **OFTEN}


def test_service_wakes_a_pod_whose_probes_are_answered_while_it_sleeps(proxied: Start, cluster: Cluster) -> None:
    """Liveness by HTTP and readiness by TCP: one failure of the former would restart it."""
    node = cluster.nodes[0]
    with proxied(200, livenessProbe=by_http(node), readinessProbe=by_tcp(node)) as found:
        for number in range(1, 4):
            wanted = found.probes(200) + 3
            eventually(partial(found.has_probes, 200, wanted), seconds=SECONDS)
            found.sleeps()
            assert found.is_ready()
            assert found.ask() == f"/work {number}"
            found.sleeps()
        assert restarts(found.kubectl, "qwen", "main") == 0
        assert "probe failed" not in found.kubectl.events()
        woken = [one["path"] for one in found.access() if one["cold"]]
        assert woken == ["/work"] * 3, "a probe has woken it"


def test_pod_that_sleeps_is_not_ready_where_its_probe_is_configured_so(proxied: Start, cluster: Cluster) -> None:
    """A Service in front of the pods alone would lose it; the proxy's wakes it, and then it is ready."""
    with proxied(503, readinessProbe=by_http(cluster.nodes[0])) as found:
        eventually(lambda: not found.is_ready(), seconds=SECONDS)
        assert found.probes(503) > 0
        eventually(lambda: found.ask().startswith("/work") and found.is_ready(), seconds=SECONDS)
        found.sleeps()
        eventually(lambda: not found.is_ready(), seconds=SECONDS)

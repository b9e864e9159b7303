"""Pods with liveness probes, and checkpoints of them that a slow disk takes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import RESTRICTED, container, pod
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.system.ctr import eventually

CHECKOUT = Path(__file__).resolve().parents[2]
DISK, BACKING = "/var/lib/kybernate/slow", "/var/lib/kybernate/backing"
RATE = 100 << 20  # bytes a second
PROBE = {
    "httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 2,
}  # fmt: skip
LIMIT = {"kybernate.io/max-freeze": "1800ms"}
# Holds 1 GiB, and counts the probes that it has answered.
PROGRAM = """
import http.server, os
piece = os.urandom(1 << 20)
memory = [bytearray(piece) for _ in range(1024)]
class Answer(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Answer.count += 1
        self.send_response(200)
        self.end_headers()
        print(Answer.count, flush=True)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 8080), Answer).serve_forever()
"""


@contextmanager
def slow_disk(node: Node) -> Iterator[None]:
    """Mount a slow filesystem in the node."""
    serve = f"cd {CHECKOUT} && exec /opt/kybernate/bin/python -m tests.fakes.slow_filesystem {DISK} {BACKING} {RATE}"
    with subprocess.Popen(
        [node.name, "sh", "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "mounted\n"
        try:
            yield
        finally:
            server.stdin.close()
    node.run("rm", "-rf", BACKING, DISK)


def answered(kubectl: Kubectl) -> int:
    return int((kubectl.logs("probed", "--tail=1").split() or ["0"])[0])


def restarts(kubectl: Kubectl) -> int:
    (status,) = kubectl.get("pod", "probed")["status"]["containerStatuses"]
    return int(status["restartCount"])


def checkpointed(node: Node, pod_: str) -> dict[str, Any]:
    """Make an image; a node with too much else to do may need more than one attempt to keep to the limit."""

    def attempt() -> str:
        script = f"kybernate checkpoint {pod_} {DISK}/image --json 2>&1"
        said = node.run("sh", "-c", script, check=False, seconds=300)
        return "" if "was undone: it had been frozen for" in said else said

    said = eventually(attempt, seconds=150)
    assert said.startswith("{"), said
    return dict(json.loads(said))


def test_pod_with_a_quick_liveness_probe_survives_its_checkpoint_to_a_slow_disk(
    kubectl: Kubectl, cluster: Cluster
) -> None:
    (node, *_) = cluster.nodes
    probe = {**PROBE, "initialDelaySeconds": 5}
    main = container("main", "python3", "-c", PROGRAM, of="python", livenessProbe=probe, **RESTRICTED)
    kubectl.apply(
        pod(
            "probed",
            handler="kybernate",
            containers=[main],
            annotations=LIMIT,
            restartPolicy="Always",
            terminationGracePeriodSeconds=1,
        )
    )
    assert eventually(lambda: answered(kubectl) > 2, seconds=90)
    assert restarts(kubectl) == 0
    with slow_disk(node):
        name = f"{kubectl.namespace}/probed"
        refused = node.run("sh", "-c", f"kybernate checkpoint {name} {DISK}/image --exit 2>&1 || true", seconds=300)
        assert "would freeze container" in refused
        assert "the annotation kybernate.io/max-freeze" in refused
        made = checkpointed(node, name)
        writing = next(step["seconds"] for step in made["steps"] if step["name"] == "write")
        assert made["frozen_ms"] / 1000 < min(writing, 2)
        before = answered(kubectl)
        assert eventually(lambda: answered(kubectl) > before + 3, seconds=60)
        assert restarts(kubectl) == 0
        assert "will be restarted" not in kubectl.events()
        assert json.loads(node.run("kybernate", "inspect", f"{DISK}/image", "--verify", "--json"))["verified"]

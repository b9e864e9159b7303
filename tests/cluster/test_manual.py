"""docs/kubernetes.md, command by command: with the agent as a DaemonSet, in place of the node's own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.pod_events import wait_for
from tests.cluster.pods import image
from tests.documentation import Block, block
from tests.lab.cluster.addresses import ADMINISTRATOR
from tests.lab.cluster.cluster import Cluster
from tests.lab.cluster.nodes import Node
from tests.lab.namespaces import CHECKOUT
from tests.system.ctr import eventually

BLOCKS = (
    block("docs/kubernetes.md", "runtime-class"),
    block("docs/kubernetes.md", "agent"),
    block("docs/kubernetes.md", "pod"),
    block("docs/kubernetes.md", "checkpoint"),
    block("docs/kubernetes.md", "story"),
    block("docs/kubernetes.md", "restore"),
)
OBJECTS = ("pod/counter", "pod/counter-2")


class Reader:
    """Who reads the page: in a copy of the checkout whose manifests have the lab's images."""

    def __init__(self, place: Path, node: str) -> None:
        self.place, self._node = place, node
        for folder in ("runtimeclass", "packaging/kubernetes"):
            shutil.copytree(CHECKOUT / folder, place / folder)
        for file in place.rglob("*.yaml"):
            named = re.compile(r"image: (docker.io/library/)?busybox(:latest)?$", re.MULTILINE)
            text = named.sub(f"image: {image()}", file.read_text())
            file.write_text(text)

    def runs(self, one: Block) -> str:
        """Run a block of the page and return what it prints; AssertionError where a command fails."""
        script = "set -e\n" + one.text.replace(" NODE ", f" {self._node} ")
        environment = {"KUBECONFIG": str(ADMINISTRATOR), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        argv = ["bash", "-c", script]
        done = subprocess.run(
            argv, cwd=self.place, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def node(cluster: Cluster, administrator: Kubectl) -> Iterator[Node]:
    """The node without an agent of its own, which has one again afterwards."""
    (found,) = cluster.nodes
    found.agent.kill()
    try:
        yield found
    finally:
        administrator("delete", "--ignore-not-found", "--now", *OBJECTS)
        administrator("delete", "--ignore-not-found", "namespace", "kybernate")
        found.agent.start()
        found.agent.wait_ready(seconds=120)


def test_page_leads_from_the_runtime_class_to_a_restored_pod(
    administrator: Kubectl, node: Node, tmp_path: Path
) -> None:
    runtime_class, agent, a_pod, checkpoint, story, restore = BLOCKS
    reader = Reader(tmp_path, node.name)
    reader.runs(runtime_class)
    assert administrator.get("runtimeclass", "kybernate")["scheduling"]["nodeSelector"]
    assert "successfully rolled out" in reader.runs(agent)
    reader.runs(a_pod)
    assert eventually(lambda: len(administrator.logs("counter").split()) > 3)
    reader.runs(checkpoint)
    assert eventually(lambda: "Checkpointed" in reader.runs(story))
    counted = int(administrator.logs("counter", "--tail=1"))
    said = reader.runs(restore)
    wait_for(administrator, "counter-2", "Restored")
    assert eventually(lambda: int(administrator.logs("counter-2", "--tail=1")) > counted), said
    first = int(administrator.logs("counter-2").split()[0])
    assert 1 < first <= counted + 1
    assert "AnnotationMistaken" not in administrator("events")
    owned = administrator.get("pod", "counter-2")["spec"]
    assert owned["overhead"] == {"cpu": "5m", "memory": "8Mi"}

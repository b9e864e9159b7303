"""Runs the end-to-end tests against the cluster of a node of the lab.

Their images have the names and versions by which the tests know them: the node's containerd has a mirror of the public
registry, whose content is made for them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab.cluster.addresses import ADMINISTRATOR, CONTROL_PLANE
from tests.lab.cluster.cluster import running
from tests.lab.cluster.nodes import MIRRORS, Node
from tests.lab.e2e_images import STORAGE
from tests.lab.node import REGISTRY_PORT, Daemon

PORT = 5001
NAMED = "registry.k8s.io"  # by the tests
BUSYBOX = "localhost:5000/busybox:latest"
PROGRAM = "/usr/local/lib/e2e/e2e.test"
VERSIONS = (("kubelet", "--version"), ("containerd", "--version"), ("runc", "--version"), ("uname", "-sr"))
CONFIG = {
    "version": 0.1,
    "log": {"level": "warn", "accesslog": {"disabled": True}},
    "storage": {"filesystem": {"rootdirectory": f"/{STORAGE}"}},
    "http": {"addr": f":{PORT}"},
}


def main(argv: Sequence[str]) -> int:
    """Serve `REPORT GINKGO-OPTION…`: write the report, and next to it the versions of what ran."""
    report, options = Path(argv[0]), list(argv[1:])
    said = [subprocess.check_output(command, text=True).splitlines()[0] for command in VERSIONS]
    report.with_suffix(".versions").write_text("\n".join(said) + "\n")
    serve_images()
    for node in running().nodes:
        use_images(node)
    where = [f"--output-dir={report.parent}", f"--json-report={report.name}"]
    tests = [f"--kubeconfig={ADMINISTRATOR}", "--provider=local"]
    return subprocess.run(["ginkgo", "run", *where, *options, PROGRAM, "--", *tests], check=False).returncode


def serve_images() -> None:
    """Start the registry that has the tests' images."""
    config = Path("/etc/lab/e2e-registry.json")
    config.write_text(json.dumps(CONFIG))  # what is JSON is YAML
    registry = Daemon("e2e-registry", ("/usr/bin/docker-registry", "serve", str(config)), (PORT,))
    registry.start()
    registry.wait_ready()


def use_images(node: Node) -> None:
    """Make that registry a mirror of the public one for a node, and port 5000 free of the lab's for those of specs.

    busybox is the lab's own, which the node has already.
    """
    named = subprocess.check_output([PROGRAM, "--list-images"], text=True).split()
    for name in (name for name in named if "/busybox:" in name):
        node.run("ctr", "-n", "k8s.io", "images", "tag", BUSYBOX, name)
    mirrors = node.path(MIRRORS)
    shutil.rmtree(mirrors / f"localhost:{REGISTRY_PORT}")
    (mirrors / NAMED).mkdir()
    (mirrors / NAMED / "hosts.toml").write_text(f'server = "http://{CONTROL_PLANE}:{PORT}"\n')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

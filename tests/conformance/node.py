"""Runs the end-to-end tests inside a node of the lab, against its cluster; their images come from a registry of theirs.

Some specs start a registry of their own on port 5000 of the node, so the lab's ends first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab.e2e_images import PROJECT, STORAGE
from tests.lab.node import Daemon, Registry

PORT = 5001
PROGRAM = "/usr/local/lib/e2e/e2e.test"
VERSIONS = (("kubelet", "--version"), ("containerd", "--version"), ("runc", "--version"), ("uname", "-sr"))
REGISTRIES = {
    "promoterE2eRegistry": f"localhost:{PORT}/{PROJECT}",
    "gcEtcdRegistry": f"localhost:{PORT}",
    "gcRegistry": f"localhost:{PORT}",
}
CONFIG = {
    "version": 0.1,
    "log": {"level": "warn", "accesslog": {"disabled": True}},
    "storage": {"filesystem": {"rootdirectory": f"/{STORAGE}"}},
    "http": {"addr": f"127.0.0.1:{PORT}"},
}


def main(argv: Sequence[str]) -> int:
    """Serve `REPORT KUBECONFIG GINKGO-OPTION…`: write the report, and beside it the versions of what ran."""
    report, kubeconfig, options = Path(argv[0]), argv[1], list(argv[2:])
    registries = serve_images()
    said = [subprocess.check_output(command, text=True).splitlines()[0] for command in VERSIONS]
    report.with_suffix(".versions").write_text("\n".join(said) + "\n")
    tests = [f"--kubeconfig={kubeconfig}", "--provider=local", f"--kube-test-repo-list={registries}"]
    where = [f"--output-dir={report.parent}", f"--json-report={report.name}"]
    return subprocess.run(["ginkgo", "run", *where, *options, PROGRAM, "--", *tests], check=False).returncode


def serve_images() -> Path:
    """Start the registry of the tests' images in the place of the lab's; return the file that names it to the tests."""
    Registry().kill()
    config, registries = Path("/etc/lab/e2e-registry.json"), Path("/etc/lab/e2e-registries.json")
    config.write_text(json.dumps(CONFIG))  # what is JSON is YAML
    registries.write_text(json.dumps(REGISTRIES))
    registry = Daemon("e2e-registry", ("/usr/bin/docker-registry", "serve", str(config)), (PORT,))
    registry.start()
    registry.wait_ready()
    return registries


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

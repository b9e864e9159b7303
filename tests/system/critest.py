"""critest, CRI's validation suite, in a node, under our runtime and under the stock one; `make critest` runs it.

Its images are made of the node's own programs: scripts and busybox's web server stand in for nginx and httpd, of which
the specs see a process and a port. Specs of the image service are left out: no runtime has a part in them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance import specs
from tests.lab import oci
from tests.lab.images import ACCOUNTS
from tests.system import comparison
from tests.system.busybox_images import busybox_image, compiled
from tests.system.ctr import Ctr

HANDLERS = ("runc", "kybernate", "kybernate-path")  # the first is the oracle
E2E, STAGING = "registry.k8s.io/e2e-test-images", "gcr.io/k8s-staging-cri-tools"  # the names that critest has
KIND = "[It] "  # of test cases that are specs; others are what runs before and after all
LEFT_OUT = r"Image Manager|Image Consistency|Image Identifier"
SECONDS = 1800
NETWORK = Path("/etc/cni/net.d/10-lab.conflist")
REPORTS = Path("build/critest")
# Has the name, the file, the words of its command line and the port of what it stands in for; serves a page.
SERVER = b"""#!/bin/sh
trap 'exit 0' TERM
echo $$ > /var/run/nginx.pid
echo "${0##*/} serves"
httpd -f -p "$1" -h /www &
wait
"""
# Prints what a program that has the set-user-ID bit may do.
UID = '#include <stdio.h>\n#include <unistd.h>\nint main(void) { printf("Effective uid: %d\\n", geteuid()); }\n'
GROUPS = {
    "etc/passwd": ACCOUNTS["etc/passwd"] + b"default-user:x:1000:1000::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\n",
    "etc/group": ACCOUNTS["etc/group"] + b"default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
}


def main(handlers: Sequence[str]) -> int:
    """Run all specs under each handler, and once more those that differ; print how they have ended, in tables."""
    with tempfile.TemporaryDirectory() as scratch:
        import_images(Path(scratch))
    map_ports()
    return comparison.compare(handlers or HANDLERS, outcomes, REPORTS, word="spec")


def outcomes(handler: str, reports: Path, only: Sequence[str] = ()) -> dict[str, str]:
    """Run specs of CRI's runtime service, all or only these, and return what became of each; the log stays."""
    reports.mkdir(parents=True, exist_ok=True)
    report = reports.resolve() / "junit.xml"
    argv = ["critest", "-runtime-handler", handler, "-registry-prefix", oci.REGISTRY, "-ginkgo.no-color"]
    argv += [f"-ginkgo.focus={one}" for one in specs.exactly(only)]
    report.unlink(missing_ok=True)  # of an earlier run
    begin = time.monotonic()
    with (reports / "critest.log").open("w") as log:
        subprocess.run([*argv, f"-ginkgo.skip={LEFT_OUT}", f"-ginkgo.junit-report={report}"], stdout=log, stderr=log,
                       stdin=subprocess.DEVNULL, timeout=SECONDS, check=False)  # fmt: skip
    found = read(report.read_text())
    if only:
        found = {spec: how for spec, how in found.items() if spec in only}
    print(f"{handler}: {len(found)} specs in {time.monotonic() - begin:.0f} s, see {reports}", flush=True)
    return found


def read(report: str) -> dict[str, str]:
    """Return the outcome of each spec of a report in JUnit's format, "passed", "failed" or "skipped" for example.

    Source: Ginkgo 2, package reporters, junit_report.go: a test case is named by its kind and its full text.
    """
    cases = [case.attrib for case in ElementTree.fromstring(report).iter("testcase")]
    return {case["name"].removeprefix(KIND): case["status"] for case in cases if case["name"].startswith(KIND)}


def map_ports() -> None:
    """Have the node's network map ports of the host, which the lab has no other use for."""
    network = json.loads(NETWORK.read_text())
    network["plugins"].append({"type": "portmap", "capabilities": {"portMappings": True}})
    NETWORK.write_text(json.dumps(network))


def import_images(scratch: Path) -> None:
    """Give containerd all images of the specs under the names that these have for them, and the registry as well."""
    machine = oci.ARCHITECTURE[platform.machine()]
    plain, server = busybox_image({}), {"var/run/.keep": b"", "www/index.html": b"hello\n"}
    images = {
        f"{E2E}/busybox:1.29-2": plain,
        f"{E2E}/nginx:1.14-2": busybox_image({**server, "bin/nginx": SERVER}, "/bin/nginx", "80", "master process"),
        f"{E2E}/httpd:2.4.39-4": busybox_image({**server, "bin/httpd-server": SERVER}, "/bin/httpd-server", "80"),
        f"{E2E}/nonewprivs:1.3": busybox_image({"bin/uid": compiled(UID, scratch)}, "/bin/uid"),
        f"{STAGING}/hostnet-nginx-{machine}:latest": busybox_image(
            {**server, "bin/nginx": SERVER}, "/bin/nginx", "12003"
        ),
        f"{STAGING}/test-image-predefined-group:latest": busybox_image(GROUPS),
        f"{STAGING}/test-image-tag:test": plain,
    }
    ctr = Ctr(namespace="k8s.io")
    for name, image in images.items():
        oci.write_archive(image, scratch / "image.tar")
        ctr("images", "import", str(scratch / "image.tar"))
        local = f"{oci.REGISTRY}/{name.partition('/')[2].partition(':')[0]}:latest"  # critest leaves out the tag
        for other in (name, local):
            ctr("images", "tag", "--force", image.reference, other)
        ctr("images", "push", "--plain-http", local)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

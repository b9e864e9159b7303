"""containerd's own tests of its client, in a node, by our shim and by the stock one; `make client-tests` runs them.

They use containers, tasks, execs, checkpoints and restarts of the daemon as programs in Go do, in a containerd of their
own. Their image is made of the node's busybox. They read their image's name before their flags, so that no flag changes
it: a registry of the node has the name of the public one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import oci
from tests.lab.cluster.certificates import Authority
from tests.lab.images import ACCOUNTS
from tests.lab.node import Daemon
from tests.lab.root import REGISTRY_STORAGE
from tests.system import comparison
from tests.system.busybox_images import busybox_image, compiled
from tests.system.ctr import KYBERNATE, STOCK, Ctr

PROGRAM = "/usr/local/lib/containerd-client.test"
RUNTIMES = {"runc": STOCK, "kybernate": KYBERNATE}  # the first is the oracle
REPORTS = Path("build/client-tests")
HOST = "ghcr.io"
IMAGES = ("containerd/busybox:1.36", "containerd/volume-ownership:2.1")  # as the tests name them
CERTIFICATES = Path("/etc/lab/client-tests")
SECONDS, GRACE, PASSES = 1200, 60, 3
# Tests by the beginnings of their names, as regular expressions, and why they do not run.
LEFT_OUT = {
    "Test(ClientTTRPC|Content|Convert|Export|IDMapped|Image|Import|Lease|Migration|PullFetch|Snapshotter|Transfer)": (
        "images, content, snapshots and configuration: no shim has a part in them, and many pull from the Internet"
    ),
}
# Sleeps again after a dump, which interrupts it; that of Debian's busybox ends then.
SLEEP = """#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char *unit;
    struct timespec left = {strtol(argv[argc - 1], &unit, 10)};
    if (*unit == 'i') for (;;) pause();
    if (*unit == 'd') left.tv_sec *= 86400;
    while (nanosleep(&left, &left) && errno == EINTR) continue;
}
"""
# Ends by SIGTERM. Debian's has no handler for it, without which the first process of a pid namespace does not get it.
NC = b"#!/bin/sh\ntrap 'kill $!; exit 143' TERM\nbusybox nc \"$@\" &\nwait $!\n"
# Users as the public image has them, and what the user namespaces' tests execute and look at.
USERS = b"sys:x:3:3::/dev:/bin/sh\nwww-data:x:33:33::/var/www:/bin/sh\n"
FILES = {
    "etc/passwd": ACCOUNTS["etc/passwd"] + USERS,
    "etc/group": ACCOUNTS["etc/group"] + b"sys:x:3:\nwww-data:x:33:\n",
    "bin/nc": NC,
    "bin/bash": b'#!/bin/sh\nexec sh "$@"\n',
    "usr/bin/passwd": b"has the set-user-ID bit\n",
}
# Prints a line for each pipe of `lsof -p PID`, which the tests count.
LSOF = """#!/bin/sh
for file in /proc/"$2"/fd/*; do [ -p "$file" ] && echo "$file FIFO"; done
exit 0
"""
# The first process of the tests' own pid namespace: nothing of them outlives it, not even what they have left frozen.
# The tests' containerd has its snapshots in the directory that comes first, which must not be an overlay.
ALONE = """
mkdir -p "$0" && mount -t tmpfs -o mode=711 client-tests "$0" || exit
"$@"
status=$?
for state in $(find /sys/fs/cgroup -name freezer.state); do echo THAWED >"$state"; done 2>/dev/null
exit $status
"""
SNAPSHOTS = "/var/lib/containerd-test"
# With this option of `go test`, a character that no test prints begins the line that says how a test has ended.
MARKED = "-test.v=test2json"
ENDED = re.compile(r"\x16--- (PASS|FAIL|SKIP): ([^\s/]+) \(")  # not those of a test's parts, which have a slash
CUT_OFF = re.compile(r"^\t\t(\w+)\S* \(\d", re.MULTILINE)  # what ran when the time was over
WORDS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


def main(handlers: Sequence[str]) -> int:
    """Run all tests by each shim, and once more those that differ; print how they have ended, in tables."""
    push_images()
    serve_images()
    lsof = Path("/usr/local/bin/lsof")
    lsof.write_text(LSOF)
    lsof.chmod(0o755)
    return comparison.compare(handlers or list(RUNTIMES), outcomes, REPORTS, word="test", left_out=LEFT_OUT)


def push_images() -> None:
    """Give the node's registry the image by each of its names."""
    ctr = Ctr(namespace="k8s.io")
    with tempfile.TemporaryDirectory() as scratch:
        image = busybox_image({**FILES, "bin/sleep": compiled(SLEEP, Path(scratch))})
        oci.write_archive(image, Path(scratch, "image.tar"))
        ctr("images", "import", str(Path(scratch, "image.tar")))
    for name in (f"{oci.REGISTRY}/{name}" for name in IMAGES):
        ctr("images", "tag", "--force", image.reference, name)
        ctr("images", "push", "--plain-http", name)


def serve_images() -> None:
    """Start a registry that has the public one's name in this node, with what the node's registry has."""
    authority = Authority("client-tests")
    authority.pair.write(CERTIFICATES / "authority")
    authority.server(HOST, [HOST]).write(CERTIFICATES / HOST)
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"127.0.0.1 {HOST}\n")
    tls = {"certificate": f"{CERTIFICATES}/{HOST}.crt", "key": f"{CERTIFICATES}/{HOST}.key"}
    config = CERTIFICATES / "registry.json"  # what is JSON is YAML
    config.write_text(json.dumps({
        "version": 0.1, "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": f"/{REGISTRY_STORAGE}"}}, "http": {"addr": ":443", "tls": tls},
    }))  # fmt: skip
    registry = Daemon("public-registry", ("/usr/bin/docker-registry", "serve", str(config)), (443,))
    registry.start()
    registry.wait_ready()


def outcomes(handler: str, reports: Path, only: Sequence[str] = ()) -> dict[str, str]:
    """Run the tests, all or only these, and return what became of each; the logs stay.

    A test that ends the whole program leaves others that have not run, for another pass.
    """
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    begin = time.monotonic()
    names, found = list(only) or chosen(_names()), dict[str, str]()
    for number in range(1, PASSES + 1):
        if missing := [name for name in names if name not in found]:
            found |= read(_run(RUNTIMES[handler], missing, reports / f"tests-{number}.log"))
    print(f"{handler}: {len(found)} tests in {time.monotonic() - begin:.0f} s, see {reports}", flush=True)
    return found


def chosen(names: Sequence[str]) -> list[str]:
    """Return which tests of the program run."""
    return [name for name in names if not any(re.match(expression, name) for expression in LEFT_OUT)]


def read(log: str) -> dict[str, str]:
    """Return the outcome of each test that has ended, and of those that the end of the time has cut off."""
    ended = {name: WORDS[how] for how, name in ENDED.findall(log)}
    _, over, running = log.partition("panic: test timed out after ")
    return dict.fromkeys(CUT_OFF.findall(running.partition("\n\n")[0]) if over else (), "cut off") | ended


def _names() -> list[str]:
    """Return all tests of the program; a short run starts no containerd."""
    short = [PROGRAM, "-test.short", "-test.list=^Test"]
    return subprocess.check_output(short, stderr=subprocess.DEVNULL, text=True).split()


def _run(runtime: str, names: Sequence[str], log: Path) -> str:
    """Run these tests by a runtime and return what they print; the log of their containerd is kept next to it."""
    with tempfile.TemporaryDirectory() as scratch:
        argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", ALONE, SNAPSHOTS]
        argv += [PROGRAM, "-test.root", MARKED, f"-test.timeout={SECONDS}s", f"-test.run=^({'|'.join(names)})$"]
        settings = {"TEST_RUNTIME": runtime, "TMPDIR": scratch, "SSL_CERT_FILE": f"{CERTIFICATES}/authority.crt"}
        with log.open("w") as output:
            subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output,
                           stderr=output, timeout=SECONDS + GRACE, check=False,
                           env={**os.environ, **settings})  # fmt: skip
        for path in Path(scratch).iterdir():
            if path.is_file() and path.name.isdigit():  # as they name what their containerd prints
                shutil.copyfile(path, log.with_name(f"containerd-{log.name}"))
    return log.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The first process of a node: starts what the node consists of, runs one command, reaps, returns its exit status.

When it ends, the kernel kills all that is left in its pid namespace.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import cgroups, containerd_config, criu_limits, project, root
from tests.lab.lanes import LANES
from tests.lab.namespaces import CHECKOUT
from tests.lab.node import LOGS, STATE, Containerd, NotReady, Registry

ARCHIVES = Path("/usr/share/lab/images")
CRIU = Path("/usr/sbin/criu"), Path("/usr/local/sbin/criu"), Path("/usr/local/lib/lab/limits_of_others.so")
NAMESPACES = ("default", "k8s.io")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FROM_TERMINAL = 0x80  # SI_KERNEL: the terminal has sent the signal to the command as well
CANNOT_START, NOT_FOUND = 125, 127


def main(argv: Sequence[str]) -> int:
    """Run `argv[1:]` in lane `argv[0]` and return its exit status, 128 plus the signal's number if one killed it."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    lane, command = argv[0], list(argv[1:])
    try:
        start_node(lane)
    except (NotReady, OSError, subprocess.SubprocessError) as error:
        print(f"lab {lane}: the node does not start: {error}", file=sys.stderr)
        return CANNOT_START
    print(f"lab {lane}: ready after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    status = supervise(command)
    cgroups.thaw(Path("/sys/fs/cgroup"))  # what is frozen by cgroup v1 cannot be killed
    if status:
        keep_logs(lane)
    return status


def start_node(lane: str) -> None:
    """Bring up loopback, and what the lane's node consists of."""
    socket.sethostname("lab")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    STATE.mkdir()
    if criu_limits.install(*CRIU):  # a cluster's nodes share these files, and find programs by the same PATH
        print(f"lab {lane}: {criu_limits.SAID}", file=sys.stderr)
    if LANES[lane].cluster:
        start_cluster(lane)
    else:
        start_containerd(lane)


def start_cluster(lane: str) -> None:
    """Start a cluster, by the project's Python, which has what its certificates are made with."""
    os.environ["KUBECONFIG"] = "/etc/kubernetes/admin.conf"
    argv = [
        f"{root.VENV}/bin/python",
        "-m",
        "tests.lab.cluster",
        lane,
        os.environ["NODES"],
        os.environ["DEFAULT_RUNTIME"],
    ]
    try:
        subprocess.run(argv, check=True)
    except subprocess.CalledProcessError:
        keep_logs(lane)
        raise


def start_containerd(lane: str) -> None:
    """Start the image registry and containerd, and import the lab's images."""
    config = Path("/etc/containerd/config.toml")
    level = os.environ.get("KYBERNATE_LAB_LOG_LEVEL", "info")
    config.write_text(containerd_config.text(LANES[lane], log_level=level))
    project.install_shim()
    daemons = (Registry(), Containerd())
    for daemon in daemons:
        daemon.start()
    for daemon in daemons:
        daemon.wait_ready()
    import_images()


def import_images() -> None:
    """Import every image into the namespaces of `ctr` and of CRI."""
    for namespace in NAMESPACES:
        for archive in sorted(ARCHIVES.glob("*.tar")):
            argv = ["ctr", "-n", namespace, "images", "import", str(archive)]
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                raise NotReady(f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}")


def supervise(command: list[str]) -> int:
    """Run `command`, hand signals on to it, reap whatever ends, and return its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=[],
            setsigdef=[*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores the last two
        )  # fmt: skip
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    while True:
        arrived = signal.sigwaitinfo([*FORWARDED, signal.SIGCHLD])
        if arrived.si_signo != signal.SIGCHLD:
            if arrived.si_code != FROM_TERMINAL:
                os.kill(child, arrived.si_signo)
        elif (status := reap(child)) is not None:
            return status


def reap(child: int) -> int | None:
    """Reap every process that has ended; return the exit status of `child` if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid == 0:
            return None


def keep_logs(lane: str) -> None:
    """Copy the daemons' logs to build/lab/LANE/ of the checkout, for the examination of a failure."""
    kept = CHECKOUT / "build/lab" / lane
    kept.mkdir(parents=True, exist_ok=True)
    for log in LOGS.glob("*.log"):
        shutil.copy(log, kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""systemd as the first process of a pid namespace in the node, with containerd and the packaged units under it.

What it may change is its own: /run, /etc and the directories of containerd and of Kybernate are mounted for it alone,
and it sees cgroup v2 alone, whose controllers it need not have. Of the units that every boot has, the journal is left:
the others would set the machine's clock, modules and kernel parameters. Mounts are shared, as systemd makes them where
it is not in a container: services with mount namespaces of their own see what is mounted later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.documentation import Block
from tests.lab.syscalls import die_with_parent
from tests.system.ctr import BUSYBOX, eventually

AGENT, SOCKET = "kybernate-agent.service", "kybernate-agent.socket"
# containerd's settings are those of its package, but for CRI, whose ports the node's own containerd has.
BEGIN = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/etc/upper /run/etc/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
mount -t tmpfs -o mode=711 tmpfs /var/lib/containerd
mount -t tmpfs -o mode=700 tmpfs /var/lib/kybernate
printf 'version = 2\\ndisabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime"]\\n' >/etc/containerd/config.toml
mkdir -p /run/systemd/system
cd /usr/lib/systemd/system
for unit in sysinit.target.wants/* local-fs.target.wants/* timers.target.wants/*; do
    case $unit in */systemd-journald.service) ;; *) ln -s /dev/null /run/systemd/system/${unit##*/} ;; esac
done
mount --make-rshared /
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin LANG=C.UTF-8 \\
    /lib/systemd/systemd --unit=basic.target
"""
CGROUP = """
mount --make-rprivate /
mkdir -p /tmp/cgroup
mount -t cgroup2 cgroup2 /tmp/cgroup
mkdir -p /tmp/cgroup/$0
echo $$ >/tmp/cgroup/$0/cgroup.procs
umount /tmp/cgroup
exec unshare --mount --pid --fork --kill-child --cgroup --ipc --uts sh -c "$1"
"""


@dataclass
class Systemd:
    """A running manager. `pid` is its process, as the node counts."""

    pid: int

    def run(self, *argv: str, status: int | None = 0) -> str:
        """Run a program under it and return its output. Fails on another exit status; None takes any."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--cgroup", "--ipc", "--uts", "--wd=/", "--"]
        done = subprocess.run([*enter, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert status in (None, done.returncode), f"{argv}: {done.returncode}\n{done.stdout}\n{self.journal()}"
        return done.stdout

    def sh(self, script: str) -> str:
        return self.run("sh", "-exc", script)

    def show(self, unit: str = AGENT) -> dict[str, str]:
        """Return the properties of a unit."""
        return dict(line.split("=", 1) for line in self.run("systemctl", "show", unit).splitlines() if "=" in line)

    def main_pid(self, unit: str = AGENT) -> int:
        """Return the main process of a unit, as the manager counts."""
        return int(self.show(unit)["MainPID"])

    def kill(self, number: signal.Signals, unit: str = AGENT) -> None:
        """Send a signal to the main process alone, past the manager."""
        self.run("kill", f"-{number.name.removeprefix('SIG')}", str(self.main_pid(unit)))

    def journal(self, unit: str = AGENT) -> str:
        """Return the last lines of the journal about a unit."""
        argv = ("journalctl", "--no-pager", "--output=short-monotonic", f"--unit={unit}", "--lines=60")
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--", *argv]
        return subprocess.run(enter, stdout=subprocess.PIPE, text=True, check=False).stdout

    def drop_in(self, name: str, text: str, unit: str = AGENT) -> None:
        """Add settings to a unit, as an administrator does."""
        directory = f"/etc/systemd/system/{unit}.d"
        self.sh(f"mkdir -p {directory}; printf '{text}' >{directory}/{name}.conf; systemctl daemon-reload")

    def containers(self) -> list[dict[str, Any]]:
        """Return what the agent knows of containers."""
        found: list[dict[str, Any]] = json.loads(self.run("kybernate", "ps", "-o", "json"))
        return found


@contextmanager
def systemd(installation: Block) -> Iterator[Systemd]:
    """Run a manager until the block ends, with containerd, and with the units as `installation` installs them."""
    argv = ["unshare", "--mount", "sh", "-c", CGROUP, "systemd-test", BEGIN]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(signal.SIGKILL))
    try:
        manager = Systemd(eventually(lambda: _first_below(process.pid), seconds=20))
        eventually(lambda: "active" in manager.run("systemctl", "is-active", "basic.target"), seconds=60)
        manager.run("systemctl", "start", "containerd.service")
        archives = "/usr/share/lab/images"
        manager.run("ctr", "images", "import", f"{archives}/{BUSYBOX.rpartition('/')[2].partition(':')[0]}.tar")
        manager.sh("cd /src; " + "\n".join(installation.commands))
        yield manager
    finally:
        process.kill()
        process.wait(20)
        eventually(_without_cgroups)


def _without_cgroups() -> bool:
    """Remove the cgroups of the manager, which is possible once its last process is gone."""
    for top in (*Path("/sys/fs/cgroup").glob("systemd-test"), *Path("/sys/fs/cgroup/unified").glob("systemd-test")):
        for directory, _, _ in os.walk(top, topdown=False):
            Path(directory).rmdir()
    return True


def _first_below(pid: int) -> int:
    """Return the child of `unshare`, once it is systemd. Raises AssertionError."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children, "unshare has no child yet"
    assert Path(f"/proc/{children[0]}/comm").read_text().strip() == "systemd"
    return int(children[0])

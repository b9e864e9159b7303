"""Turns a process into the first one of a cluster's node: namespaces, cgroups, mounts and a network of its own.

`python3 -m tests.lab.cluster.machine NUMBER` leaves that process behind and prints its pid. It only reaps; what the
node consists of is started into its namespaces by the command NODE, which this module writes, and ends with it.

Files of the node's own stand in for settings of the kernel below /proc/sys, and for its boot_id.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.lab import cgroups, syscalls
from tests.lab.cluster import addresses
from tests.lab.node import ENVIRONMENT, Daemon
from tests.lab.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC, MS_SHARED, mount

COMMANDS = Path("/usr/local/bin")
REAPER = ("/usr/bin/catatonit", "-P")
# What a node keeps over its reboot, below /var/lib/lab/NODE. containerd's state is in memory, where the lab's is.
KEPT = (
    *("etc/cni/net.d", "etc/containerd", "etc/kubernetes", "etc/kybernate", "var/lib/cni", "var/lib/kubelet"),
    *("var/lib/kybernate", "var/log/containers", "var/log/kybernate", "var/log/pods"),
)
# kubelet sets these to what it wants, or ends. They are the machine's, so that it finds files with its values instead.
TUNABLES = {
    "kernel/keys/root_maxbytes": 25000000, "kernel/keys/root_maxkeys": 1000000, "kernel/panic": 10,
    "kernel/panic_on_oops": 1, "vm/overcommit_memory": 1, "vm/panic_on_oom": 0,
}  # fmt: skip
BOOT_ID = "kernel/random/boot_id"  # by which programs know that the node has been rebooted
WHOLE_PROC = Path("/run/proc")
INTERFACE_SECONDS = 20.0  # for the kernel to remove the interface of a node that was killed
LISTENING = "0A"  # a state of /proc/PID/net/tcp
ACCEPTS = 1 << 16  # a flag of /proc/PID/net/unix
ENTER = """#!/bin/sh
# Runs a command in {name}: its namespaces and its cgroups. Options of nsenter may precede it.
for group in {groups}; do echo $$ >"$group/cgroup.procs"; done
exec nsenter --target {pid} --mount --uts --ipc --net --pid --cgroup "$@"
"""


class Machine(Daemon):
    """The first process of node `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"node-{number}", ("/usr/bin/python3", "-m", "tests.lab.cluster.machine", str(number)))

    @property
    def into(self) -> tuple[str, ...]:
        """The words before a command that run it in the node with the pid that the caller's child has."""
        return (self.name, "--no-fork", "--")

    def start(self) -> None:
        """Make the namespaces; they are complete when this returns."""
        # The checkout is where this module is found, and the node's Python has nothing of the caller's environment.
        checkout = Path(__file__).resolve().parents[3]
        self.pid_file.write_bytes(subprocess.check_output(self.argv, cwd=checkout, env=ENVIRONMENT))


@dataclass(frozen=True)
class InNode(Daemon):
    """A program of the node of `machine`, whose ports are in the node's network. `sockets`: that it serves as well."""

    machine: Machine | None = None
    sockets: tuple[str, ...] = ()

    def serves(self) -> bool:
        """Look at what the kernel lists for the node's network: a connection would have to come from within."""
        assert self.machine is not None
        net = Path(f"/proc/{self.machine.pid}/net")
        rows = [row.split() for table in ("tcp", "tcp6") for row in (net / table).read_text().splitlines()[1:]]
        ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING}
        rows = [row.split() for row in (net / "unix").read_text().splitlines()[1:]]
        sockets = {row[7] for row in rows if len(row) > 7 and int(row[3], 16) & ACCEPTS}
        return ports >= set(self.ports) and sockets >= set(self.sockets)


def main(argv: list[str]) -> int:
    """Make node `argv[0]` and print the pid of its first process."""
    number = int(argv[0])
    name = f"node-{number}"
    groups = cgroups.create(name)
    told, tell = os.pipe()
    inside = os.fork()
    if inside == 0:
        _leave(name, groups, tell)
    os.close(tell)
    with os.fdopen(told) as ready:
        pid = int(ready.readline())
        _connect(pid, name, number)
        if ready.readline() != "mounted\n":
            raise OSError(f"the mounts of {name} could not be made; see above")
    os.waitpid(inside, 0)
    _write_command(name, pid, groups)
    print(pid)
    return 0


def _leave(name: str, groups: list[Path], tell: int) -> NoReturn:
    """Become the node's first process, in a child of this one. Never returns into the caller's code."""
    try:
        _unshare(groups)
        if pid := os.fork():
            os.write(tell, f"{pid}\n".encode())
            os._exit(0)
        os.setsid()
        socket.sethostname(name)
        _mount(name, cgroups.hierarchies())
        os.write(tell, b"mounted\n")
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.execv(REAPER[0], REAPER)
    except BaseException:  # noqa: BLE001  # a forked process must not run on in its parent's code
        traceback.print_exc()
    os._exit(1)


def _unshare(groups: list[Path]) -> None:
    """Enter the node's cgroups, and leave all namespaces; the next child is the first process of the new ones."""
    cgroups.enter(groups)
    syscalls.unshare(
        syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC
        | syscalls.CLONE_NEWCGROUP | syscalls.CLONE_NEWPID
    )  # fmt: skip
    cgroups.settle(groups)


def _mount(name: str, machine: list[cgroups.Hierarchy]) -> None:
    """Give the node mounts of its own. They are shared, so that volumes appear in containers as they do elsewhere."""
    strict = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    for path in KEPT:
        _bind(addresses.STATE / name / path, Path("/", path))
    _bind(addresses.CONTAINERD_STATE / name, addresses.CONTAINERD_STATE)
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("proc", "/proc", "proc", strict)
    mount("sysfs", "/sys", "sysfs", strict)
    cgroups.mount_inside(Path("/sys/fs/cgroup"), machine)
    _cover_tunables()
    mount("none", "/", flags=MS_REC | MS_SHARED)


def _cover_tunables() -> None:
    """Show files of the node's own in place of what /proc/sys has of the machine.

    A user namespace may mount a /proc of its own only where it sees a whole one, and /proc is now covered in part.
    """
    for place, value in {**TUNABLES, BOOT_ID: uuid.uuid4()}.items():
        file = Path("/run/tunables", place)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        mount(file, Path("/proc/sys", place), flags=MS_BIND)
    WHOLE_PROC.mkdir(mode=0o700)
    mount("proc", WHOLE_PROC, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _bind(source: Path, target: Path) -> None:
    for path in (source, target):
        path.mkdir(parents=True, exist_ok=True)
    mount(source, target, flags=MS_BIND)


def _connect(pid: int, name: str, number: int) -> None:
    """Give the node an interface on the cluster's network, and a route to the rest of the world by way of it."""
    others = [(addresses.pod_range(other), addresses.node_address(other)) for other in range(1, 4) if other != number]
    address = addresses.node_address(number)
    _add_interface(name, pid)
    for arguments in (f"link set {name} master {addresses.BRIDGE} up",
                      f"route replace {addresses.pod_range(number)} via {address}"):  # fmt: skip
        subprocess.run(["ip", *shlex.split(arguments)], check=True)
    inside = ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up",
              f"route add default via {addresses.CONTROL_PLANE}"]  # fmt: skip
    inside += [f"route add {pods} via {via}" for pods, via in others]
    there = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    subprocess.run([*there, "ip", "-batch", "-"], input="\n".join(inside), text=True, check=True)
    subprocess.run([*there, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"], check=True)


def _add_interface(name: str, pid: int) -> None:
    """Make the two ends of the node's interface.

    That of a node that was killed goes with its namespace, which the kernel removes some time later. While it does,
    the name is taken, and there is nothing that could be deleted.
    """
    until = time.monotonic() + INTERFACE_SECONDS
    add = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
    while True:
        subprocess.run(["ip", "link", "delete", name], stderr=subprocess.DEVNULL, check=False)
        done = subprocess.run(add, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return
        if time.monotonic() > until:
            raise OSError(f"{' '.join(add)}: {done.stderr.strip()}")
        time.sleep(0.05)


def _write_command(name: str, pid: int, groups: list[Path]) -> None:
    """Write the command that runs others in the node."""
    occupied = [group / cgroups.LEAF if (group / cgroups.LEAF).exists() else group for group in groups]
    command = COMMANDS / name
    command.write_text(ENTER.format(name=name, pid=pid, groups=" ".join(map(str, occupied))))
    command.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

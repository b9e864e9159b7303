"""Turns a process into the first one of a node: namespaces of its own, the node's mounts, its root by pivot_root.

CRIU refuses a root made by chroot ("No parent found for mountpoint"), hence pivot_root.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tests.lab import cgroups, syscalls
from tests.lab.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT, mount

CHECKOUT = Path("/src")
# What snapshots, mounts and sockets live on must not be an overlay itself. Checkpoints may be large and go to disk;
# containerd's files are many and small, and making and removing them on a disk took most of a run's time.
ON_DISK = ("tmp", "var/tmp", "var/lib/kybernate", "var/lib/lab", "var/log/lab")
IN_MEMORY = {"run": MS_NOSUID | MS_NODEV, "var/lib/containerd": 0}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse", "net/tun")
DEVICE_GLOBS = ("nvidia*", "nvidia-caps/*")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


@dataclass(frozen=True)
class Node:
    """What a node is made of: read-only layers, topmost first; a throw-away directory; the checkout; its cgroups.

    `unified`: it sees cgroup v2 alone.
    """

    layers: tuple[Path, ...]
    scratch: Path
    checkout: Path
    cgroups: list[Path]
    unified: bool = False


def enter(node: Node) -> None:
    """Move this process, pid 1 of a new pid namespace, into `node`; afterwards nothing of the machine is in sight."""
    machine = cgroups.hierarchies(unified=node.unified)
    cgroups.enter(node.cgroups)
    syscalls.unshare(
        syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUTS
        | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWCGROUP
    )  # fmt: skip
    cgroups.settle(node.cgroups)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = overlay(node.layers, node.scratch)
    _mount_writable(node.scratch / "disk", root)
    _mount_kernel(root)
    _make_devices(root / "dev")
    cgroups.mount_inside(root / "sys/fs/cgroup", machine)
    _mount_checkout(node.checkout, root)
    syscalls.pivot_root(root)


def overlay(layers: tuple[Path, ...], scratch: Path) -> Path:
    """Mount `layers` under a writable one in `scratch` and return where. Changes lie in `scratch`/upper."""
    if _on_overlay(scratch):
        mount("tmpfs", scratch, "tmpfs", data="mode=755")
    upper, work, root = (scratch / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    lower = ":".join(str(path) for path in layers)
    mount("overlay", root, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work}")
    return root


def _on_overlay(path: Path) -> bool:
    """Tell whether `path` lies on an overlay, as it does where the machine is itself a container."""
    device = path.stat().st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == f"{os.major(device)}:{os.minor(device)}":
            return right.startswith("overlay ")
    return False


def _mount_writable(disk: Path, root: Path) -> None:
    """Mount what must not lie on the overlay."""
    for path, flags in IN_MEMORY.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        mount("tmpfs", root / path, "tmpfs", flags, "mode=755")
    for path in ON_DISK:
        (disk / path).mkdir(parents=True)
        (disk / path).chmod(0o1777 if path.endswith("tmp") else 0o755)
        (root / path).mkdir(parents=True, exist_ok=True)
        mount(disk / path, root / path, flags=MS_BIND)


def _mount_kernel(root: Path) -> None:
    """Mount the kernel's file systems; each shows the namespaces of this process."""
    strict = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("proc", root / "proc", "proc", strict)
    mount("sysfs", root / "sys", "sysfs", strict)
    mount("tmpfs", root / "dev", "tmpfs", MS_NOSUID, "mode=755")


def _make_devices(dev: Path) -> None:
    """Fill /dev with the machine's harmless devices and GPUs; terminals and shared memory are the node's own."""
    host = Path("/dev")
    for device in [*(host / name for name in DEVICES), *(path for glob in DEVICE_GLOBS for path in host.glob(glob))]:
        if device.exists() and not device.is_dir():
            copy = dev / device.relative_to(host)
            copy.parent.mkdir(exist_ok=True)
            status = device.stat()
            os.mknod(copy, status.st_mode, status.st_rdev)
            copy.chmod(stat.S_IMODE(status.st_mode))
    for name, target in DEVICE_LINKS.items():
        (dev / name).symlink_to(target)
    for name, fstype, data in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620,gid=5"),
        ("shm", "tmpfs", "mode=1777"),
        ("mqueue", "mqueue", ""),
    ):
        (dev / name).mkdir()
        mount(fstype, dev / name, fstype, MS_NOSUID | MS_NOEXEC, data)


def _mount_checkout(checkout: Path, root: Path) -> None:
    """Show the checkout, read-only but for build/, where results go."""
    inside = root / CHECKOUT.relative_to("/")
    inside.mkdir(exist_ok=True)
    mount(checkout, inside, flags=MS_BIND)
    mount("none", inside, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    mount(checkout / "build", inside / "build", flags=MS_BIND)

"""Gives each node a cgroup subtree of its own, on machines with cgroup v1, v2 or both, and takes it away again.

Source: cgroups(7), cgroup_namespaces(7), the kernel's admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.failure import LabFailed
from tests.lab.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount

PREFIX = "kybernate-lab-"
LEAF = "lab"
FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup hierarchy. `controllers` is v1's list ("cpu,cpuacct", "name=systemd"), and empty for v2."""

    controllers: str
    top: Path

    @property
    def v2(self) -> bool:
        return not self.controllers


def hierarchies(*, unified: bool = False) -> list[Hierarchy]:
    """Return the hierarchies that this machine has mounted, v1's first; v2's alone where `unified` is wanted.

    Where v1 has the controllers, v2 alone tracks, freezes and kills processes but limits nothing.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    known = [line.split(":")[1] for line in lines]
    found = [Hierarchy(controllers, top) for controllers in known for top in _mount_points(controllers)[:1]]
    return sorted((one for one in found if one.v2 or not unified), key=lambda one: one.v2)


def _mount_points(controllers: str) -> list[Path]:
    wanted = set(controllers.split(",")) - {""}
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fstype, _, options = right.split(" ")
        if fstype == ("cgroup" if wanted else "cgroup2") and wanted <= set(options.split(",")):
            points.append(Path(left.split(" ")[4]))
    return points


def create(name: str) -> list[Path]:
    """Make the cgroup of node `name` in every hierarchy and return all of them."""
    groups = []
    for hierarchy in hierarchies():
        group = hierarchy.top / f"{PREFIX}{name}"
        if hierarchy.v2:
            _delegate(hierarchy.top)
        group.mkdir()
        if "cpuset" in hierarchy.controllers.split(","):
            _inherit_cpuset(group)
        groups.append(group)
    return groups


def enter(groups: list[Path]) -> None:
    """Move this process into `groups`. Where it leaves its cgroup namespace next, they are the new one's roots."""
    for group in groups:
        (group / "cgroup.procs").write_text("0")


def settle(groups: list[Path]) -> None:
    """Let the children of `groups` have the controllers of v2, as the children of a machine's root have them.

    A v2 group that gives controllers to its children holds no processes: this one, the only one, moves into a leaf.
    """
    for group in groups:
        if _controllers(group):
            (group / LEAF).mkdir()
            enter([group / LEAF])
            _delegate(group)


def _controllers(group: Path) -> list[str]:
    """Return the v2 controllers that can be given to the children of `group`; none in v1, or where v1 has them all."""
    path = group / "cgroup.controllers"
    return path.read_text().split() if path.exists() else []


def _delegate(group: Path) -> None:
    """Give all controllers of `group` to its children."""
    control = group / "cgroup.subtree_control"
    missing = set(_controllers(group)) - set(control.read_text().split())
    if missing and (group / "cgroup.type").exists():
        _vacate(group)
    for controller in sorted(missing):
        try:
            control.write_text(f"+{controller}")
        except OSError as error:
            raise LabFailed(f"{control} does not accept +{controller}: {error}") from error


def _vacate(group: Path) -> None:
    """Move the processes of `group` into a leaf of it, as every container that starts containers must do.

    Only the machine's true root, which has no type, may hold processes and children with controllers. Asking first
    and mending afterwards does not work: the first controller can turn the group into one that refuses the others.
    """
    leaf = group / f"{PREFIX}machine"
    for pid in (group / "cgroup.procs").read_text().split():
        leaf.mkdir(exist_ok=True)
        try:
            (leaf / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue


def _inherit_cpuset(group: Path) -> None:
    """A v1 cpuset begins empty, and no process can enter it so."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if not (group / name).read_text().strip():
            (group / name).write_text((group.parent / name).read_text())


def mount_inside(target: Path, machine: list[Hierarchy]) -> None:
    """Mount the machine's hierarchies on `target` as systemd lays them out; each shows this cgroup namespace's part."""
    if all(one.v2 for one in machine):
        mount("cgroup2", target, "cgroup2", FLAGS)
        return
    mount("tmpfs", target, "tmpfs", FLAGS, "mode=755")
    for one in machine:
        point = target / (one.controllers.removeprefix("name=") or "unified")
        point.mkdir()
        if one.v2:
            mount("cgroup2", point, "cgroup2", FLAGS)
            continue
        mount("cgroup", point, "cgroup", FLAGS, one.controllers)
        for single in one.controllers.split(",") if "," in one.controllers else ():
            (target / single).symlink_to(point.name)


def remove(name: str, *, seconds: float = 20) -> None:
    """Remove the cgroups of node `name`, as soon as its last process is gone. Raises LabFailed if one stays."""
    tops = [hierarchy.top / f"{PREFIX}{name}" for hierarchy in hierarchies()]
    end = time.monotonic() + seconds
    while any(not _removed(top) for top in tops):
        for top in tops:
            thaw(top)
        if time.monotonic() > end:
            left = ", ".join(f"{group}: {pids}" for top in tops for group, pids in _occupied(top))
            raise LabFailed(f"cgroups of the node {name} cannot be removed; processes in them: {left or 'none'}")
        time.sleep(0.02)


def thaw(top: Path) -> None:
    """Thaw every v1 group at and under `top`: a process that is frozen there cannot even be killed."""
    for state in [top / "freezer.state", *top.glob("**/freezer.state")]:
        try:
            state.write_text("THAWED")
        except OSError:
            continue


def _removed(top: Path) -> bool:
    try:
        for directory, _, _ in os.walk(top, topdown=False):
            Path(directory).rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    return not top.exists()


def _occupied(top: Path) -> Iterator[tuple[Path, list[str]]]:
    for procs in top.glob("**/cgroup.procs"):
        try:
            if pids := procs.read_text().split():
                yield procs.parent, pids
        except OSError:
            continue

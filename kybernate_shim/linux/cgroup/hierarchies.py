"""Where a process's cgroups are in the file system.

/proc/<pid>/cgroup names them from the root of *our* cgroup namespace, mountinfo says which part of a hierarchy is
mounted where, from the same root. The two together give the directory. Source: cgroup_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_cgroup_mounts
from kybernate_shim.linux.process import is_exiting

UNIFIED = ""  # the key of the version 2 hierarchy, next to the controllers of version 1
ROOT_ONLY = "cgroup.sane_behavior"  # a file that only the root of a version 1 hierarchy has
DELETED = " (deleted)"


def directories(pid: int) -> dict[str, Path]:
    """Return the directory in every hierarchy that we can reach, by controller; the unified one is UNIFIED.

    A version 1 hierarchy in whose root the process is does not control it, and its figures are the host's: left out.
    Raises ProcessLookupError when the process has ended: the kernel then shows the root for version 1.
    """
    names = read_names(pid)
    if any(controller != UNIFIED for controller in names) and is_exiting(pid):
        raise ProcessLookupError(f"process {pid} has left its cgroups")
    mounts = hierarchy_mounts(read_cgroup_mounts())
    found = {}
    for controller, name in names.items():
        group = mounts.get(controller, [])
        path = locate(group, name, pid)
        if path is None or (any(path == mount.path for mount in group) and (path / ROOT_ONLY).exists()):
            continue
        found[controller] = path
    return found


def read_names(pid: int) -> dict[str, str]:
    """Return the cgroup's name in every hierarchy, by controller. Raises ProcessLookupError."""
    try:
        return parse_names(text_of(f"/proc/{pid}/cgroup"))
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None


def parse_names(text: str) -> dict[str, str]:
    """Parse /proc/<pid>/cgroup, lines of "id:controller,controller:name". Source: cgroups(7)."""
    names = {}
    for line in lines_of(text):
        _, controllers, name = line.split(":", 2)
        for controller in controllers.split(","):
            names[controller] = name.removesuffix(DELETED)
    return names


def hierarchy_mounts(mounts: Iterable[MountPoint]) -> dict[str, list[MountPoint]]:
    """Return the mounts of every hierarchy, by controller, those that show most of it first."""
    found: dict[str, list[MountPoint]] = {}
    for mount in mounts:
        if mount.type == "cgroup2":
            found.setdefault(UNIFIED, []).append(mount)
        elif mount.type == "cgroup":
            for option in mount.super_options:
                found.setdefault(option, []).append(mount)
    for group in found.values():
        group.sort(key=lambda mount: len(_parts(mount.root)))
    return found


def locate(mounts: Iterable[MountPoint], name: str, pid: int) -> Path | None:
    """Return the directory of the cgroup `name`, None when no mount shows it."""
    candidates = []
    for mount in mounts:
        if inner := beneath(mount.root, name):
            candidates.append(mount.path / inner)
        elif mount.root.startswith("/.."):
            candidates += _search(mount.path, name, pid)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return next((path for path in candidates if path.is_dir()), candidates[0])


def beneath(root: str, name: str) -> str | None:
    """Return `name` relative to `root`, "." for the root itself, None when it is not below it or cannot be named.

    Both may begin with "/..", which stands for what is above our cgroup namespace.
    """
    top, path = _parts(root), _parts(name)
    if path[: len(top)] != top:
        return None
    rest = path[len(top) :]
    return None if ".." in rest else "/".join(rest) or "."


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part]


def _search(mount: Path, name: str, pid: int) -> list[Path]:
    """Find the cgroup below a mount from outside our cgroup namespace: its upper directories have no name for us."""
    tail = name.strip("/")
    for directory, _, _ in os.walk(mount):
        path = Path(directory)
        if not tail or directory.endswith("/" + tail):
            try:
                if str(pid) in (path / "cgroup.procs").read_text().split():
                    return [path]
            except OSError:
                pass  # a threaded cgroup, or one that has just been removed
    return []

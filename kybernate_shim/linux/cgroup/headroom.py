"""How much more memory a container may take: its VRAM moves into its own host memory, and is charged to its cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.hierarchies import hierarchy_mounts
from kybernate_shim.linux.mount.mountinfo import read_mountinfo

UNLIMITED_V1 = 1 << 62  # version 1 writes "no limit" as a huge number


@dataclass(frozen=True)
class Headroom:
    """Bytes that are left, and what limits them, in words."""

    bytes: int
    limit: str


def headroom(cgroup: Cgroup, meminfo: Path = Path("/proc/meminfo")) -> Headroom:
    """Return the narrowest of the node's free memory and of the limits of the cgroup and all above it."""
    found = [Headroom(available_bytes(meminfo), "the node's available memory")]
    try:
        found += _limits(cgroup.path("memory"), cgroup.version)
    except FileNotFoundError:
        pass  # memory is not limited here
    return min(found, key=lambda one: one.bytes)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return what the kernel says the node can still use without swapping."""
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


def _limits(directory: Path, version: int) -> Iterator[Headroom]:
    limit, usage, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    roots = {mount.path for mounts in hierarchy_mounts(read_mountinfo()).values() for mount in mounts}
    while directory not in roots and directory != directory.parent:
        try:
            most = (directory / limit).read_text().strip()
            if most != "max" and int(most) < UNLIMITED_V1:
                used = int((directory / usage).read_text()) - _statistic(directory / "memory.stat", cache)
                yield Headroom(max(0, int(most) - used), f"{limit} of {directory}")
        except (OSError, ValueError):
            pass  # a level without the controller, or one that has gone
        directory = directory.parent


def _statistic(path: Path, name: str) -> int:
    """Return one figure of memory.stat: file cache that the kernel drops before it kills."""
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} ")), 0)

"""Which CPUs and devices are near which memory, and where pages are to come from.

By default, a page lies near the CPU of the thread that touched it first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.libc import mbind
from kybernate_shim.sizes import NO_NODE

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")
MPOL_PREFERRED = 1
MASK_BYTES = 128  # for 1024 nodes, as many as any kernel has
CPU = 36  # among the fields after the name in /proc/PID/stat, see proc_pid_stat(5)


def memory_of_nodes(nodes: Path = NODES) -> dict[int, int]:
    """Return the bytes of memory that each node has; empty where the kernel does not report it."""
    found = {}
    for file in nodes.glob("node*/meminfo"):
        if match := re.search(r"Node (\d+) MemTotal: +(\d+) kB", file.read_text()):
            found[int(match[1])] = int(match[2]) << 10
    return found


def node_of_device(bus_id: str, devices: Path | None = None) -> int:
    """Return the node that a PCI device is near, by an id such as "0000:1B:00.0"; NO_NODE where none is known."""
    try:
        return int(((devices or DEVICES) / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return NO_NODE


def processors_of(node: int, nodes: Path = NODES) -> set[int]:
    """Return the CPUs of a node that we may use; all of ours where it has none."""
    ours = os.sched_getaffinity(0)
    try:
        return ours & parse_list((nodes / f"node{node}" / "cpulist").read_text()) or ours
    except OSError:
        return ours


def prefer(address: int, size: int, node: int) -> None:
    """Allocate the pages of our mapping on `node`; those of a shared file also if another process touches them.

    Where that node is full, the pages come from another one: under a strict policy the kernel would kill a process to
    make room. See mbind(2). Raises OSError.
    """
    mask = (1 << node).to_bytes(MASK_BYTES, "little")
    mbind(address, size, MPOL_PREFERRED, mask)


def processors_near(tid: int, nodes: Path = NODES) -> set[int]:
    """Return the CPUs of the node on which thread `tid` runs, of those that we may use; all if none is known."""
    ours = os.sched_getaffinity(0)
    try:
        fields = text_of(f"/proc/{tid}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ours
    here = int(fields[CPU])
    for file in nodes.glob("node*/cpulist"):
        if here in (cpus := parse_list(file.read_text())):
            return ours & cpus or ours
    return ours


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found

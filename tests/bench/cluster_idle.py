"""What a cluster of one node costs while it has no pod: memory, and CPU time.

`cluster.memory`: of the control plane and of what a node of Kubernetes has, kubelet, kube-proxy and containerd. Most
of them are one program; its pages count once, whichever other clusters of the machine have them as well.
`cluster.idle`: the CPUs in use, of all that runs in the lab's node, the agent and the image registry among it, as its
cgroup counts them. Both are compared with their bars.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.figures import Pair
from tests.lab.cluster.cluster import Cluster, running
from tests.lab.node import Daemon

NAMES = MEMORY, IDLE = "cluster.memory", "cluster.idle"
MOST_MIB = 1.2 * 1024
MOST_CPUS = 0.15
WINDOWS, SECONDS = 5, 20.0  # of which the median counts: kubelet and etcd do some of their work every ten seconds
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")  # its root is the lab's


def pairs() -> Iterator[Pair]:
    yield Pair(MEMORY, _mebibytes, lambda: MOST_MIB, 1.0, "MiB", within=1)
    yield Pair(IDLE, _cpus, lambda: MOST_CPUS, 1.0, "CPUs", within=WINDOWS)


def _mebibytes() -> float:
    own, of_files = 0, dict[str, int]()
    for daemon in _kubernetes(running()):
        for mapped in psutil.Process(daemon.pid).memory_maps():
            own += mapped.anonymous
            of_files[mapped.path] = max(of_files.get(mapped.path, 0), mapped.rss - mapped.anonymous)
    return (own + sum(of_files.values())) / MIB


def _kubernetes(cluster: Cluster) -> Iterator[Daemon]:
    """Yield the programs of the control plane and of its first node, but for this project's agent."""
    node = cluster.nodes[0]
    yield from (cluster.etcd, cluster.api_server, cluster.controllers, cluster.scheduler, cluster.name_server)
    yield from (node.containerd, node.kubelet, node.proxy)


def _cpus() -> float:
    found = []
    for _ in range(WINDOWS):
        begun, used = time.monotonic(), _used()
        time.sleep(SECONDS)
        found.append((_used() - used) / (time.monotonic() - begun))
    return statistics.median(found)


def _used() -> float:
    """Return the CPU time of all that has run in the lab's node, in seconds."""
    if (usage := CGROUPS / "cpuacct/cpuacct.usage").exists():
        return int(usage.read_text()) / 1e9
    table = dict(line.split() for line in (CGROUPS / "cpu.stat").read_text().splitlines())
    return int(table["usage_usec"]) / 1e6

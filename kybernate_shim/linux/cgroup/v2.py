"""What a cgroup of version 2 has used, as containerd's message. Source: the kernel's "Control Group v2"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kybernate_shim.linux.cgroup.files import Directory, fill, hugepage_sizes, number, pairs, rdma_rows
from kybernate_shim.messages import cgroup2_pb2 as wire

MEMORY_FILES = {
    "usage": "memory.current",
    "usage_limit": "memory.max",
    "swap_usage": "memory.swap.current",
    "swap_limit": "memory.swap.max",
    "max_usage": "memory.peak",
    "swap_max_usage": "memory.swap.peak",
}


def read_metrics(path: Path) -> wire.Metrics:
    """Return the figures of the cgroup at `path`; what its kernel or its controllers do not count is left out.

    Raises FileNotFoundError when the cgroup is gone.
    """
    metrics = wire.Metrics()
    with Directory(path) as cgroup:
        _pids(cgroup, metrics)
        _cpu(cgroup, metrics)
        _memory(cgroup, metrics)
        _rdma(cgroup, metrics)
        _io(cgroup, metrics)
        _hugetlb(cgroup, metrics)
    return metrics


def _pids(cgroup: Directory, metrics: wire.Metrics) -> None:
    _numbers(cgroup, metrics.pids, {"current": "pids.current", "limit": "pids.max"})


def _cpu(cgroup: Directory, metrics: wire.Metrics) -> None:
    fill(metrics.cpu, cgroup.table("cpu.stat"))
    _pressure(cgroup.text("cpu.pressure"), metrics.cpu)


def _memory(cgroup: Directory, metrics: wire.Metrics) -> None:
    if table := cgroup.table("memory.stat"):
        fill(metrics.memory, table)
        _numbers(cgroup, metrics.memory, MEMORY_FILES)
        _pressure(cgroup.text("memory.pressure"), metrics.memory)
    if events := cgroup.table("memory.events"):
        metrics.memory_events.SetInParent()
        fill(metrics.memory_events, events)


def _rdma(cgroup: Directory, metrics: wire.Metrics) -> None:
    for device, handles, objects in rdma_rows(cgroup.text("rdma.current")):
        metrics.rdma.current.add(device=device, hca_handles=handles, hca_objects=objects)
    for device, handles, objects in rdma_rows(cgroup.text("rdma.max")):
        metrics.rdma.limit.add(device=device, hca_handles=handles, hca_objects=objects)


def _io(cgroup: Directory, metrics: wire.Metrics) -> None:
    text = cgroup.text("io.stat")
    if text is None:
        return
    metrics.io.SetInParent()
    for (major, minor), values in io_rows(text):
        fill(metrics.io.usage.add(major=major, minor=minor), values)
    _pressure(cgroup.text("io.pressure"), metrics.io)


def io_rows(text: str) -> Iterator[tuple[tuple[int, int], dict[str, int]]]:
    """Yield (major, minor) and counters. Some kernels put devices that did nothing on the line of the next one."""
    for line in text.splitlines():
        words = line.split()
        devices = [word for word in words if "=" not in word]
        values = {key: number(value) or 0 for key, value in pairs(words).items()}
        if devices and values:
            major, _, minor = devices[-1].partition(":")
            yield (int(major), int(minor)), values


def _hugetlb(cgroup: Directory, metrics: wire.Metrics) -> None:
    for size in hugepage_sizes(cgroup.names(), ".current"):
        entry = metrics.hugetlb.add(pagesize=size)
        _numbers(cgroup, entry, {"current": f"hugetlb.{size}.current", "max": f"hugetlb.{size}.max"})
        entry.failcnt = cgroup.table(f"hugetlb.{size}.events").get("max", 0)


def _numbers(
    cgroup: Directory, message: wire.PidsStat | wire.MemoryStat | wire.HugeTlbStat, files: dict[str, str]
) -> None:
    fill(message, {field: value for field, file in files.items() if (value := cgroup.number(file)) is not None})


def _pressure(text: str | None, message: wire.CPUStat | wire.MemoryStat | wire.IOStat) -> None:
    """Set `psi` from lines such as "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"."""
    for line in (text or "").splitlines():
        kind, *words = line.split()
        values = pairs(words)
        data = message.psi.full if kind == "full" else message.psi.some
        data.avg10, data.avg60, data.avg300 = (float(values.get(f"avg{span}", 0)) for span in (10, 60, 300))
        data.total = number(values.get("total", "")) or 0

"""What a container has used on a host with cgroups of version 1, as containerd's message.

Each controller may be a separate hierarchy, with its own directory. Source: the kernel's "Control Groups version 1".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kybernate_shim.linux.cgroup.files import UNLIMITED, Directory, fill, hugepage_sizes, number, rdma_rows
from kybernate_shim.messages import cgroup1_pb2 as wire

MEMORY_NAMES = {  # the kernel's line: our field, where they differ
    "pgpgin": "pg_pg_in",
    "pgpgout": "pg_pg_out",
    "pgfault": "pg_fault",
    "pgmajfault": "pg_maj_fault",
    "total_pgpgin": "total_pg_pg_in",
    "total_pgpgout": "total_pg_pg_out",
    "total_pgfault": "total_pg_fault",
    "total_pgmajfault": "total_pg_maj_fault",
    "hierarchical_memsw_limit": "hierarchical_swap_limit",
}
MEMORY_ENTRIES = {"usage": "memory", "swap": "memory.memsw", "kernel": "memory.kmem", "kernel_tcp": "memory.kmem.tcp"}
MEMORY_FILES = {"limit": "limit_in_bytes", "usage": "usage_in_bytes", "max": "max_usage_in_bytes", "failcnt": "failcnt"}
HUGETLB_FILES = {"usage": "usage_in_bytes", "max": "max_usage_in_bytes", "failcnt": "failcnt"}
# Which of them counts depends on the I/O scheduler; throttling counts with every one.
BLKIO_PREFIXES = ("blkio.", "blkio.bfq.", "blkio.throttle.")
BLKIO_FILES = {
    "io_service_bytes_recursive": "io_service_bytes_recursive",
    "io_serviced_recursive": "io_serviced_recursive",
    "io_queued_recursive": "io_queued_recursive",
    "io_service_time_recursive": "io_service_time_recursive",
    "io_wait_time_recursive": "io_wait_time_recursive",
    "io_merged_recursive": "io_merged_recursive",
    "io_time_recursive": "time_recursive",
    "sectors_recursive": "sectors_recursive",
}


def read_metrics(paths: Mapping[str, Path]) -> wire.Metrics:
    """Return the figures of the cgroup whose directories `paths` gives by controller.

    A controller that is missing, or whose directory is gone, is left out. Raises FileNotFoundError when all are gone.
    """
    readers: dict[str, Callable[[Directory, wire.Metrics], None]] = {
        "hugetlb": _hugetlb,
        "pids": _pids,
        "cpuacct": _usage,
        "cpu": _throttling,
        "memory": _memory,
        "blkio": _blkio,
        "rdma": _rdma,
    }
    metrics = wire.Metrics()
    missing: FileNotFoundError | None = None
    found = 0
    for controller in readers.keys() & paths.keys():
        try:
            with Directory(paths[controller]) as cgroup:
                readers[controller](cgroup, metrics)
                found += 1
        except FileNotFoundError as error:
            missing = error
    if missing and not found:
        raise missing
    return metrics


def _hugetlb(cgroup: Directory, metrics: wire.Metrics) -> None:
    for size in hugepage_sizes(cgroup.names(), ".usage_in_bytes"):
        _numbers(cgroup, metrics.hugetlb.add(pagesize=size), f"hugetlb.{size}", HUGETLB_FILES)


def _pids(cgroup: Directory, metrics: wire.Metrics) -> None:
    metrics.pids.current = cgroup.number("pids.current") or 0
    limit = cgroup.number("pids.max") or 0
    metrics.pids.limit = 0 if limit == UNLIMITED else limit  # 0 is how this message says "none"


def _usage(cgroup: Directory, metrics: wire.Metrics) -> None:
    usage = metrics.cpu.usage
    usage.total = cgroup.number("cpuacct.usage") or 0
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    ticks = cgroup.table("cpuacct.stat")
    usage.user, usage.kernel = ticks.get("user", 0) * tick, ticks.get("system", 0) * tick
    usage.per_cpu.extend(number(word) or 0 for word in (cgroup.text("cpuacct.usage_percpu") or "").split())


def _throttling(cgroup: Directory, metrics: wire.Metrics) -> None:
    table = cgroup.table("cpu.stat")
    throttling = metrics.cpu.throttling
    throttling.periods = table.get("nr_periods", 0)
    throttling.throttled_periods = table.get("nr_throttled", 0)
    throttling.throttled_time = table.get("throttled_time", 0)


def _memory(cgroup: Directory, metrics: wire.Metrics) -> None:
    metrics.memory.SetInParent()
    fill(metrics.memory, {MEMORY_NAMES.get(key, key): value for key, value in cgroup.table("memory.stat").items()})
    for field, prefix in MEMORY_ENTRIES.items():
        if cgroup.number(f"{prefix}.usage_in_bytes") is not None:
            _numbers(cgroup, getattr(metrics.memory, field), prefix, MEMORY_FILES)
    if table := cgroup.table("memory.oom_control"):
        metrics.memory_oom_control.SetInParent()
        fill(metrics.memory_oom_control, table)


def _blkio(cgroup: Directory, metrics: wire.Metrics) -> None:
    for field, file in BLKIO_FILES.items():
        entries = getattr(metrics.blkio, field)
        for prefix in BLKIO_PREFIXES:
            rows = list(blkio_rows(cgroup.text(prefix + file) or ""))
            for (major, minor), op, value in rows:
                entries.add(op=op, device=_device(major, minor), major=major, minor=minor, value=value)
            if rows:
                break


def blkio_rows(text: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Yield (major, minor), operation and value of "8:0 Read 1" or "8:0 1" lines; the sum of all devices is no row."""
    for line in text.splitlines():
        device, *op, value = line.split() or ("", "")
        major, colon, minor = device.partition(":")
        if colon and len(op) <= 1:
            yield (int(major), int(minor)), op[0] if op else "", number(value) or 0


def _device(major: int, minor: int) -> str:
    """Return the device's path, empty when it has gone."""
    try:
        return "/dev/" + Path(f"/sys/dev/block/{major}:{minor}").readlink().name.replace("!", "/")
    except OSError:
        return ""


def _rdma(cgroup: Directory, metrics: wire.Metrics) -> None:
    for device, handles, objects in rdma_rows(cgroup.text("rdma.current")):
        metrics.rdma.current.add(device=device, hca_handles=handles, hca_objects=objects)
    for device, handles, objects in rdma_rows(cgroup.text("rdma.max")):
        metrics.rdma.limit.add(device=device, hca_handles=handles, hca_objects=objects)


def _numbers(
    cgroup: Directory, message: wire.HugetlbStat | wire.MemoryEntry, prefix: str, files: Mapping[str, str]
) -> None:
    values = {field: cgroup.number(f"{prefix}.{file}") for field, file in files.items()}
    fill(message, {field: value for field, value in values.items() if value is not None})

"""A cluster whose pods run when it ends: the machine's settings are never changed, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lab import cache, cgroups

ROOT = Path(__file__).resolve().parents[2]
POD = """set -e
kubectl run one --image=localhost:5000/busybox:latest --overrides='{"spec": {"runtimeClassName": "kybernate"}}' -- sleep 1000
kubectl wait --for=condition=Ready --timeout=60s pod/one >&2
echo up
read end
"""  # noqa: E501  # a command of the shell
# What no program changes but on an administrator's behalf; the rest counts, or is random.
SETTINGS = (
    *("fs/file-max", "fs/inotify/*", "fs/nr_open", "kernel/core_pattern", "kernel/keys/*", "kernel/panic*"),
    *("kernel/pid_max", "kernel/threads-max", "net/bridge/*", "net/core/*", "net/ipv4/ip_forward"),
    *("net/netfilter/nf_conntrack_buckets", "net/netfilter/nf_conntrack_max", "net/netfilter/nf_conntrack_tcp_*"),
    *("vm/max_map_count", "vm/min_free_kbytes", "vm/overcommit_*", "vm/panic_on_oom", "vm/swappiness"),
)


def test_cluster_leaves_the_machine_as_it_was() -> None:
    before = settings()
    with cluster() as run:
        assert settings() == before
        groups = [group for hierarchy in cgroups.hierarchies() if (group := hierarchy.top / f"{cgroups.PREFIX}{run}")]
        inside = namespaces(pid for group in groups for pid in processes(group))
        assert {kind for kind, _ in inside} >= {"mnt", "net", "pid"}
        assert len([kind for kind, _ in inside if kind == "net"]) >= 3, "those of the run, of its node and of the pod"
    assert settings() == before
    assert not [group for group in groups if group.exists()]
    assert not inside & namespaces(path.name for path in Path("/proc").glob("[0-9]*"))
    assert not (cache.directory() / "runs" / run).exists()
    assert run not in Path("/proc/self/mountinfo").read_text()
    assert not [file for file in Path("/sys/block").glob("loop*/loop/backing_file") if run in file.read_text()]


@contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster with a pod while the block does; give the name of its run."""
    words = [sys.executable, "tests/lab/run", "--nodes", "1", "cluster", "--", "sh", "-c", POD]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=None, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "up\n" in lines, "the cluster or its pod has not started; see above"
        (run,) = (cache.directory() / "runs").glob(f"cluster-{process.pid}-*")
        yield run.name
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(120) == 0


def settings() -> dict[str, str]:
    """Return the machine's settings, by their paths."""
    found = (file for place in SETTINGS for file in sorted(Path("/proc/sys").glob(place)) if os.access(file, os.R_OK))
    return {str(file): file.read_text() for file in found if file.is_file()}


def processes(group: Path) -> Iterator[str]:
    """Return the pids of all processes in a cgroup and below it."""
    for place, _, _ in os.walk(group):
        with suppress(OSError):  # has been removed
            yield from Path(place, "cgroup.procs").read_text().split()


def namespaces(pids: Iterator[str]) -> set[tuple[str, str]]:
    """Return the kinds and numbers of the namespaces in which processes are, but for this process's own."""
    found: set[tuple[str, str]] = set()
    for pid in pids:
        with suppress(OSError):  # has ended
            found |= _namespaces(pid)
    return found - _namespaces("self")


def _namespaces(pid: str) -> set[tuple[str, str]]:
    return {(link.name, str(link.readlink())) for link in Path(f"/proc/{pid}/ns").iterdir()}

"""What the node holds: of GPUs and arena, and by its CUDA helper, its shims and the containers of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 5
PAUSE_SECONDS = 0.4  # between two of them: what is there for a moment is in none of the least
OWNERS = {  # of processes, by a word of their command line
    "helper": "kybernate_shim.cuda_helper.helper",
    "shims": "containerd-shim-kybernate",
}
# How much more may be held afterwards. Programs begin threads and open files as their requests come; allocators and
# interpreters keep what they have freed. A leak in each cycle is a multiple of these after hundreds of them.
SLACK = {"vram MiB": 1.1, "arena MiB": 1.1, "resident MiB": 1.15}
MORE = {"vram MiB": 64, "arena MiB": 64, "resident MiB": 32, "descriptors": 2, "threads": 2}
PROGRAMS_MORE = 8
KINDS = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}


@dataclass(frozen=True)
class Grown:
    """A figure before and after, and the most that is no leak."""

    name: str
    before: int
    after: int
    most: int

    @property
    def good(self) -> bool:
        return self.after <= self.most


def compared(before: Mapping[str, int], after: Mapping[str, int]) -> list[Grown]:
    """Return every figure that both have."""
    return [Grown(name, before[name], after[name], most(name, before[name])) for name in before if name in after]


def most(name: str, before: int) -> int:
    """Return what a figure, such as "helper threads", may be at most afterwards."""
    kind = next(kind for kind in MORE if name.endswith(kind))
    more = PROGRAMS_MORE if name.startswith("programs") and kind in ("descriptors", "threads") else MORE[kind]
    return int(before * SLACK.get(kind, 1.0)) + more


def least(look: Callable[[], dict[str, int]], samples: int = SAMPLES) -> dict[str, int]:
    """Return the least of each figure in a few looks."""
    found = look()
    for _ in range(samples - 1):
        time.sleep(PAUSE_SECONDS)
        found = {name: min(value, found.get(name, value)) for name, value in look().items()}
    return found


def by_processes(containers: Sequence[str]) -> dict[str, int]:
    """Return descriptors, threads and resident memory, summed up by who owns the processes."""
    owners: dict[str, list[int]] = {name: [] for name in (*OWNERS, "programs")}
    here = _namespace("self")
    for pid in _pids():
        if owner := _owner(pid, here, containers):
            owners[owner].append(int(pid))
    return {f"{owner} {kind}": value for owner, pids in owners.items() for kind, value in _sum(pids).items()}


def resident_kib(containers: Sequence[str], *, agent: int) -> dict[str, int]:
    """Return the resident memory of containers, helper with its workers, shims, and of the process `agent`, in KiB."""
    here = _namespace("self")
    helpers = {pid for pid in _pids() if _owner(pid, here, containers) == "helper"}
    found = dict.fromkeys((*OWNERS, "programs", "agent"), 0)
    for pid in _pids():
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(re.findall(r"^(VmRSS|PPid):\s+(\d+)", status, re.MULTILINE))
            owner = "agent" if pid == str(agent) else _owner(pid, here, containers)
            owner = "helper" if fields.get("PPid") in helpers else owner
            if owner:
                found[owner] += int(fields.get("VmRSS", 0))
    return found


def by_programs(containers: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the resident memory of each container by its kind, in MiB."""
    found = {name: dict.fromkeys(KINDS.values(), 0) for name in containers}
    for pid in _pids():
        try:
            if name := _container(pid, containers):
                status = Path(f"/proc/{pid}/status").read_text()
                for kind, kib in re.findall(r"^(Rss\w+):\s+(\d+)", status, re.MULTILINE):
                    found[name][KINDS[kind]] += int(kib) >> 10
        except OSError:
            continue
    return found


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _owner(pid: str, here: str, containers: Sequence[str]) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        if _namespace(pid) == here:
            return next((owner for owner, word in OWNERS.items() if word in line), "")
        return "programs" if _container(pid, containers) else ""
    except OSError:  # it has ended
        return ""


def _container(pid: str, containers: Sequence[str]) -> str:
    cgroup = Path(f"/proc/{pid}/cgroup").read_text()
    return next((name for name in containers if re.search(rf"/{re.escape(name)}$", cgroup, re.MULTILINE)), "")


def _namespace(pid: str) -> str:
    return str(Path(f"/proc/{pid}/ns/mnt").readlink())


def _sum(pids: Iterable[int]) -> dict[str, int]:
    totals = {"descriptors": 0, "threads": 0, "resident MiB": 0}
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            status = (place / "status").read_text()
            found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
            totals["descriptors"] += len(list((place / "fd").iterdir()))
            totals["threads"] += int(found.get("Threads", 0))
            totals["resident MiB"] += int(found.get("VmRSS", 0)) >> 10
        except OSError:
            continue
    return totals

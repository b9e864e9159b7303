"""Which processors are near which memory: a page lies, as a rule, where the thread ran that has touched it first."""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PROCESSOR = 36  # of the fields behind the name in /proc/PID/stat, see proc_pid_stat(5)


def processors_near(tid: int, nodes: Path = NODES) -> set[int]:
    """Return the processors of the node on which thread `tid` runs, of those that we may use; all if none is known."""
    ours = os.sched_getaffinity(0)
    try:
        fields = Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ours
    here = int(fields[PROCESSOR])
    for file in nodes.glob("node*/cpulist"):
        if here in (processors := parse_list(file.read_text())):
            return ours & processors or ours
    return ours


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found

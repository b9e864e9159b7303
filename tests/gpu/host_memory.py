"""The machine's memory: how much there is, and touching it before something is measured.

A virtual machine may get its memory from the host only when it is touched for the first time, at 1.5 GB/s by one
process and 5 GB/s by several. Loads nothing of the project.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GIB = 1 << 30
SHARE = 0.85  # of what is available that is touched at most
PROCESSES = 8
# The kernel shall end these processes, and no other, where there is not enough.
TOUCH = """
import mmap, sys
piece = bytes(2 << 20)
open("/proc/self/oom_score_adj", "w").write("1000")
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for offset in range(0, len(memory) // len(piece) * len(piece), len(piece)):
    memory[offset : offset + len(piece)] = piece
print("touched", flush=True)
sys.stdin.read()
"""


def total() -> int:
    """Return the bytes of memory that the machine has."""
    return _meminfo()["MemTotal"] << 10


def available() -> int:
    """Return the bytes that programs can have without swapping."""
    return _meminfo()["MemAvailable"] << 10


def used() -> int:
    found = _meminfo()
    return (found["MemTotal"] - found["MemAvailable"]) << 10


def touch(size: int) -> bool:
    """Touch `size` bytes once, in other processes; return whether they were to be had.

    Each process keeps its part until all have theirs: memory that one gives back would be another's part.
    """
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TOUCH, str(max(size // PROCESSES, 4096))]
    touching = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(PROCESSES)]
    touched = [process.stdout is not None and bool(process.stdout.readline()) for process in touching]
    for process in touching:
        process.communicate()
    return all(touched)


def touch_what_is_there(size: int) -> int:
    """Touch `size` bytes, or as many as the machine can spare, and return how many."""
    size = min(size, int(available() * SHARE))
    return size if touch(size) else 0


def _meminfo() -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(value) for name, value in found}

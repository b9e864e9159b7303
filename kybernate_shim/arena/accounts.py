"""To which pod or container room in the arena is charged: what the kernel says of a process's cgroup.

A process cannot choose it: its cgroup is the runtime's choice, and a cgroup that is made within that of a container
still has the container's name, and its pod's, in its path.
"""

from __future__ import annotations

import re
from pathlib import Path

from kybernate_shim.arena.records import Record
from kybernate_shim.linux.kernel_text import lines_of, text_of

POD = re.compile(r"\bpod([0-9a-f]{8}[-_](?:[0-9a-f]{4}[-_]){3}[0-9a-f]{12})\b|-pod([0-9a-f_]{36})\.slice")
CONTAINER = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")


def account_of(pid: int) -> str:
    """Return a name for the pod of a process; for its container, or its cgroup, where it is of no pod.

    Empty for a process that is gone.
    """
    try:
        return account_in(text_of(f"/proc/{pid}/cgroup"))
    except OSError:
        return ""


def account_in(text: str) -> str:
    """Read the text of /proc/PID/cgroup, of version 1 or 2."""
    if found := POD.search(text):
        return f"pod {(found[1] or found[2]).replace('_', '-')}"
    if found := CONTAINER.search(text):
        return f"container {found[1]}"
    paths = [line.split(":", 2)[2] for line in lines_of(text) if line.count(":") >= 2]
    return f"cgroup {max(paths, key=len, default='/')}"


def drop_copies(copies: list[tuple[Path, Record]], account: str, most: int) -> None:
    """Drop `copies` of an account, which begin with the oldest, until it has at most so many bytes."""
    own = [one for one in copies if one[1].account == account]
    size = sum(record.room_bytes for _, record in own)
    for one in own:
        if size <= most:
            return
        size -= one[1].room_bytes
        one[0].unlink()
        copies.remove(one)

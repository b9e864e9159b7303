"""Which files of the node a process holds: descriptors, directories and its program, by the mount that each is on.

CRIU opens files for restored processes by path, as root. A link that was put in place after the checkpoint could lead
such a path out of the container. What was opened that way lies on a mount that no mount namespace of the container has.
Source: proc(5), /proc/PID/fdinfo and /proc/PID/mountinfo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

# The kernel's own mounts are in no mountinfo: those of memory, and those of what is not a file at all, whose names do
# not begin with /.
INTERNAL: Final = ("/memfd:", "/SYSV", "/dev/zero (deleted)", "/[aio]", "/anon_hugepage")
LINKS: Final = ("cwd", "root", "exe")
MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


def outside(pids: Iterable[int]) -> Iterator[str]:
    """Yield a sentence for everything that a process holds on a mount that none of the processes can see.

    For processes that do not run. Raises OSError where one has ended.
    """
    pids = list(pids)
    mounts = {number for pid in pids for number in mounts_of(pid)}
    for pid in pids:
        for name in [entry.name for entry in os.scandir(f"/proc/{pid}/fd")]:
            link = str(Path(f"/proc/{pid}/fd/{name}").readlink())
            if is_path(link) and mount_of(f"/proc/{pid}/fdinfo/{name}") not in mounts:
                yield f"process {pid}: descriptor {name} is {link!a}, which is on no mount of the container"
        for name in LINKS:
            link = str(Path(f"/proc/{pid}/{name}").readlink())
            if is_path(link) and mount_of_link(f"/proc/{pid}/{name}") not in mounts:
                yield f"process {pid}: {name} is {link!a}, which is on no mount of the container"


def is_path(link: str) -> bool:
    """Return whether a link of /proc names a file of a filesystem, and not the kernel's own memory or no file."""
    return link.startswith("/") and not link.startswith(INTERNAL)


def mounts_of(pid: int) -> Iterator[int]:
    """Yield the ids of the mounts that a process can see. Raises OSError."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:  # noqa: PTH123  # a loop over hundreds of small files
        for line in file:
            yield int(line.split(b" ", 1)[0])


def mount_of(path: str) -> int:
    """Return the id of the mount that a descriptor is on, by the path of its fdinfo; -1 where that names none."""
    with open(path) as file:  # noqa: PTH123
        return mount_in(file.read())


def mount_in(info: str) -> int:
    """Return the id of the mount that the text of an fdinfo names, -1 where it names none."""
    found = MOUNT_ID.search(info)
    return int(found[1]) if found else -1


def mount_of_link(path: str) -> int:
    """Return the id of the mount that what a link of /proc leads to is on. Raises OSError."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return mount_of(f"/proc/self/fdinfo/{fd}")
    finally:
        os.close(fd)

"""Makes a forked process what the client is, so that a daemon is the same whoever started it.

What a process can take over, it does; what it cannot, such as another namespace, is looked at, and the client has to do
its work itself. All of it is read from /proc while the client waits. Source: proc(5).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kybernate_shim.linux.hierarchies import hierarchy_mounts, locate, parse_names
from kybernate_shim.linux.libc import core_scheduling_cookie, share_core_scheduling_cookie
from kybernate_shim.linux.mountinfo import read_mountinfo

NAMESPACES = ("mnt", "net", "pid", "pid_for_children", "user", "uts", "ipc", "cgroup", "time")
FIELDS = frozenset({
    "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
})  # fmt: skip
TEXTS = ("attr/current", "personality")  # the security label; what kernel and hardware pretend to be
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Unlike(Exception):
    """The client has something that a process cannot be given afterwards."""


def become_like(pid: int) -> None:
    """Take over everything that a child of process `pid` would have inherited, but its descriptors.

    Raises Unlike, and OSError where something could not be taken over, which comes to the same.
    """
    client = Path(f"/proc/{pid}")
    status = _status(client)
    _compare(client, status)
    _join_cgroups(client)
    _take_limits(pid)
    _take_schedule(pid)
    os.umask(int(status["Umask"], 8))
    _take_environment((client / "environ").read_bytes())
    os.chdir(client / "cwd")


def _compare(client: Path, status: dict[str, str]) -> None:
    ours = Path("/proc/self")
    own = _status(ours)
    for field in FIELDS & (status.keys() | own.keys()):
        if status.get(field) != own.get(field):
            raise Unlike(f"{field} of the client is {status.get(field)}, not {own.get(field)}")
    for name in NAMESPACES:
        if _link(client / "ns" / name) != _link(ours / "ns" / name):
            raise Unlike(f"the client is in another {name} namespace")
    for name in TEXTS:
        if _text(client / name) != _text(ours / name):
            raise Unlike(f"the client has another {name}")
    if not (client / "root").samefile("/"):
        raise Unlike("the client has another root directory")


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _link(path: Path) -> str | None:
    """Return where a link of /proc points, None where this kernel has no such link."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None  # no security module


def _join_cgroups(client: Path) -> None:
    """Move into the client's cgroup in every hierarchy; mostly it is ours already."""
    theirs, ours = ((process / "cgroup").read_text() for process in (client, Path("/proc/self")))
    if theirs != ours:
        for directory in _directories(parse_names(theirs), parse_names(ours), int(client.name)):
            (directory / "cgroup.procs").write_text(str(os.getpid()))


def _directories(theirs: dict[str, str], ours: dict[str, str], pid: int) -> Iterator[Path]:
    mounts = hierarchy_mounts(read_mountinfo())
    different = [name for name in theirs if theirs[name] != ours.get(name)]
    found = {name: locate(mounts.get(name, []), theirs[name], pid) for name in different}
    if missing := [name for name, path in found.items() if path is None and name in mounts]:
        raise Unlike(f"the client's cgroup of {', '.join(missing)} cannot be seen from here")
    yield from dict.fromkeys(path for path in found.values() if path is not None)


def _take_limits(pid: int) -> None:
    for kind in LIMITS:
        wanted = resource.prlimit(pid, kind)
        if wanted != resource.getrlimit(kind):
            resource.setrlimit(kind, wanted)


def _take_schedule(pid: int) -> None:
    nice, policy = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if policy != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_getparam(pid))
    if (cpus := os.sched_getaffinity(pid)) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    if core_scheduling_cookie(pid) != core_scheduling_cookie(0):
        share_core_scheduling_cookie(pid)


def _take_environment(block: bytes) -> None:
    wanted = dict(entry.partition(b"=")[::2] for entry in block.split(b"\0") if b"=" in entry)
    if wanted != dict(os.environb):
        os.environb.clear()
        os.environb.update(wanted)

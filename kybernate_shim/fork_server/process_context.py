"""Gives a forked process the client's context, so that a daemon is the same for every caller.

A process takes over all that it can. What it cannot take over, such as another namespace, is compared, and where it
differs, the client has to do its work itself. All of it is read from /proc while the client waits, so every read is
counted. Source: proc(5).
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.cgroup.hierarchies import hierarchy_mounts, locate, parse_names
from kybernate_shim.linux.mount.mountinfo import read_cgroup_mounts
from kybernate_shim.linux.prctl import core_scheduling_cookie, share_core_scheduling_cookie

NAMESPACES = ("mnt", "net", "pid", "pid_for_children", "user", "uts", "ipc", "cgroup", "time")
FIELDS = (
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
    "SigBlk",
)  # fmt: skip
TEXTS = ("attr/current", "personality")  # the security label; what kernel and hardware pretend to be
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # the client is not a Python program
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class ProcessContext:
    """What a process cannot take over from another one; and its umask and ignored signals, a bit each, which it can."""

    fixed: dict[str, str]
    umask: int
    ignored: int

    @classmethod
    def of(cls, process: str) -> ProcessContext:
        """Read it; `process` is a pid or "self"."""
        status = dict(line.split(":", 1) for line in _read(process, "status").splitlines() if ":" in line)
        fixed = {name: status.get(name, "").strip() for name in FIELDS}
        for name in NAMESPACES:
            fixed[f"{name} namespace"] = _link(process, f"ns/{name}")
        for name in TEXTS:
            fixed[name] = _read_if_any(process, name)
        root = os.stat(f"/proc/{process}/root")  # noqa: PTH116
        fixed["root directory"] = f"{root.st_dev}:{root.st_ino}"
        return cls(fixed, int(status["Umask"], 8), int(status["SigIgn"], 16))


def adopt_context(pid: int, own: ProcessContext) -> None:
    """Take over everything that a child of process `pid` would have inherited, but its descriptors.

    `own` is ours, as it has been since this process, or the one it was forked from, was executed.
    Raises ValueError, and OSError where something could not be taken over, which means the same.
    """
    theirs = ProcessContext.of(str(pid))
    for name, value in theirs.fixed.items():
        if value != own.fixed[name]:
            raise ValueError(f"the client's {name} is {value!r}, ours {own.fixed[name]!r}")
    _join_cgroups(pid)
    _take_limits(pid)
    _take_schedule(pid)
    os.umask(theirs.umask)
    _take_ignored(theirs.ignored, own.ignored)
    _take_environment(_read(str(pid), "environ"))
    os.chdir(f"/proc/{pid}/cwd")


def _join_cgroups(pid: int) -> None:
    """Move into the client's cgroup in every hierarchy; usually it is ours already."""
    theirs, ours = _read(str(pid), "cgroup"), _read("self", "cgroup")
    if theirs != ours:
        for directory in _directories(parse_names(theirs), parse_names(ours), pid):
            (directory / "cgroup.procs").write_text(str(os.getpid()))


def _directories(theirs: dict[str, str], ours: dict[str, str], pid: int) -> Iterator[Path]:
    mounts = hierarchy_mounts(read_cgroup_mounts())
    found = {
        name: locate(mounts[name], place, pid)
        for name, place in theirs.items()
        if place != ours.get(name) and name in mounts
    }
    if missing := [name for name, path in found.items() if path is None]:
        raise ValueError(f"the client's cgroup of {', '.join(missing)} cannot be seen from here")
    yield from dict.fromkeys(path for path in found.values() if path is not None)


def _take_limits(pid: int) -> None:
    if _read(str(pid), "limits") != _read("self", "limits"):
        for kind in LIMITS:
            resource.setrlimit(kind, resource.prlimit(pid, kind))


def _take_schedule(pid: int) -> None:
    nice, policy = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    if policy != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_getparam(pid))
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if (cpus := os.sched_getaffinity(pid)) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    if core_scheduling_cookie(pid) != core_scheduling_cookie(0):
        share_core_scheduling_cookie(pid)


def _take_ignored(theirs: int, ours: int) -> None:
    """Ignore the signals that the client does, which `nohup` or a parent has chosen, and those that Python ignores."""
    for number in range(1, signal.NSIG):
        bit = 1 << (number - 1)
        if (theirs ^ ours) & bit and number not in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_IGN if theirs & bit else signal.SIG_DFL)


def _take_environment(block: str) -> None:
    wanted = dict(entry.split("=", 1) for entry in block.split("\0") if "=" in entry)
    if wanted != dict(os.environ):
        os.environ.clear()
        os.environ.update(wanted)


def _link(process: str, name: str) -> str:
    """Return where a link of /proc points, "" where this kernel has no such link."""
    try:
        return os.readlink(f"/proc/{process}/{name}")  # noqa: PTH115
    except FileNotFoundError:
        return ""


def _read_if_any(process: str, name: str) -> str:
    try:
        return _read(process, name)
    except OSError:
        return ""  # such as the label without a security module


def _read(process: str, name: str) -> str:
    """Return a file of /proc, whose size is not known in advance."""
    fd = os.open(f"/proc/{process}/{name}", os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        os.close(fd)
    return os.fsdecode(b"".join(parts))

"""What is left of a checkpoint or a restore whose programs were killed, and how it is cleared away.

A runtime that is killed leaves CRIU running, and CRIU leaves the processes that it was about to restore: some wait for
it forever, others keep running, in a container that containerd does not know. Mounts of both stay as well. All of it
is found by what those programs were given: their environment names the bundle, config.json names the cgroup, and the
directories are ours.
Imports little, because `delete` has no time for more.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kybernate_shim.errors import Failed
from kybernate_shim.linux.cgroup.cgroup import DECISIVE, Cgroup
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, hierarchy_mounts
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.mount.rootfs import unmount_tree
from kybernate_shim.run_directory import SOURCES

SCRATCH = ".criu.cgyard."  # begins the name of the directory where CRIU mounts the cgroup hierarchies
POLL_SECONDS = 0.005
ROUND_SECONDS = 0.001
PATIENCE_SECONDS = 1.0  # for the environment of one process of a tenant
EXEC_SECONDS = 0.5  # longer than any exec takes that is not stuck
MOST_ENVIRONMENT = 1 << 20  # bytes; the runtime's is the daemon's, and begins with what containerd was given


@dataclass(frozen=True)
class Traces:
    """What identifies the parts of an operation on one container.

    `configuration` is the file that the environment of its programs names; `cgroups_path` is config.json's, "" where
    others may be in that cgroup; `state` is the runtime's directory for the container, and `work` the name of CRIU's.
    """

    configuration: Path
    cgroups_path: str
    state: Path
    work: str

    def end_programs(self, *, seconds: float = 5) -> None:
        """Kill the runtime and CRIU and wait until they are gone. Raises Failed after `seconds`."""
        deadline = time.monotonic() + seconds
        while pids := told_of(self.configuration, everywhere=False):
            _kill(pids, deadline)

    def clear_restore(self, *, seconds: float = 5) -> None:
        """Kill all that a restore has begun, and remove its mounts and cgroups; blocks.

        Not for a container that ran before: this ends it. Raises Failed after `seconds`, and OSError.
        """
        deadline = time.monotonic() + seconds
        cgroup = Cgroup(*named(self.cgroups_path)) if self.cgroups_path else None
        while pids := [*told_of(self.configuration), *(cgroup.processes() if cgroup is not None else ())]:
            if cgroup is not None:
                cgroup.kill()
            _kill(pids, deadline)
        for scratch in scratch_mounts(self.work):
            unmount_tree(scratch)
            scratch.rmdir()
        unmount_tree(self.state / "criu-root")
        if (sources := SOURCES / self.work).exists():
            unmount_tree(sources)
            sources.rmdir()
        for directory in every_hierarchy(self.cgroups_path) if self.cgroups_path else ():
            _remove_cgroup(directory, deadline)


def work_name(namespace: str, container: str, verb: str = "restore") -> str:
    """Return the name of the directory for the logs and scratch files of an operation on a container."""
    return f"{namespace}.{container}.{verb}"


def told_of(configuration: Path, *, everywhere: bool = True) -> list[int]:
    """Return the processes whose environment names that file as CRIU's configuration.

    Without `everywhere`, only those in our own pid namespace, where the runtime and CRIU itself run: a container's own
    processes may claim anything. Where none is found, waits EXEC_SECONDS at most for those in the middle of exec,
    however many they are.
    """
    sign = b"=" + os.fsencode(configuration) + b"\0"
    ours = _pid_namespace("self")
    end = time.monotonic() + EXEC_SECONDS
    found: set[int] = set()
    done: set[int] = set()
    while True:
        waiting = False
        for pid in _pids() - done:
            match _look(pid, sign, ours, everywhere=everywhere):
                case Look.NAMED:
                    found.add(pid)
                    done.add(pid)
                case Look.IN_EXEC:
                    waiting = True
                case Look.OTHER:
                    done.add(pid)
        if found or not waiting or time.monotonic() > end:
            return sorted(found)
        time.sleep(ROUND_SECONDS)


class Look(Enum):
    """What one look at a process shows."""

    NAMED = "named"
    OTHER = "other"
    IN_EXEC = "in exec"


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208  # names are all that is needed


def _look(pid: int, sign: bytes, ours: int, *, everywhere: bool) -> Look:
    """Look at a process once, and never wait for it indefinitely.

    The kernel shows no environment in the middle of exec. Nor does it show that of a process that hides it, by prctl(2)
    or by unmapping it, which neither the runtime nor CRIU does. Of those in exec, only programs in our own pid
    namespace count: CRIU's other processes, which are those that it restores, were forked.
    """
    try:
        inside = _pid_namespace(pid) == ours
        if not inside and not everywhere:
            return Look.OTHER
        environment = _beginning(f"/proc/{pid}/environ") if inside else _patiently(f"/proc/{pid}/environ")
        if not environment and inside:
            os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115  # fails for zombies and threads of the kernel
            before = _bounds(pid)
            environment = _beginning(f"/proc/{pid}/environ")
            if not environment and (before[1] == b"0" or _bounds(pid) != before):
                return Look.IN_EXEC
    except (OSError, ValueError):
        return Look.OTHER  # it has ended, or has no memory
    return Look.NAMED if sign in environment else Look.OTHER


def _bounds(pid: int) -> tuple[bytes, bytes]:
    """Return where a process's environment begins and ends: 0 before exec has set it, and elsewhere after each exec."""
    *_, start, end, _ = _beginning(f"/proc/{pid}/stat").split()
    return start, end


def _beginning(path: str) -> bytes:
    """Return the first bytes of a file in /proc: a process can make its environment as large as its memory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MOST_ENVIRONMENT)
    finally:
        os.close(fd)


def _patiently(path: str) -> bytes:
    """As `_beginning`, for memory of a tenant's process, whose pages may come from a filesystem that does not answer.

    It is empty then, and the thread is left behind: none of CRIU's processes has such an environment.
    """
    found: list[bytes] = []

    def read() -> None:
        with suppress(OSError):
            found.append(_beginning(path))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(PATIENCE_SECONDS)
    return found[0] if found else b""


def _pid_namespace(pid: int | str) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino  # noqa: PTH116  # once for each process of the node


def named(cgroups_path: str) -> tuple[int, dict[str, Path]]:
    """Return the version of a container's cgroup and its directory by controller, whether they exist or not."""
    name = plain_path(cgroups_path)
    mounts = {controller: group[0].path for controller, group in hierarchy_mounts(read_mountinfo()).items()}
    if any(controller in mounts for controller in DECISIVE):
        return 1, {controller: path / name for controller, path in mounts.items() if controller != UNIFIED}
    return 2, {UNIFIED: mounts[UNIFIED] / name}


def every_hierarchy(cgroups_path: str) -> list[Path]:
    """Return the existing directories of a container's cgroup, in those hierarchies, too, that only track processes."""
    name = plain_path(cgroups_path)
    roots = {group[0].path for group in hierarchy_mounts(read_mountinfo()).values()}
    return [root / name for root in sorted(roots) if (root / name).is_dir()]


def plain_path(cgroups_path: str) -> str:
    """Return config.json's cgroupsPath as a path below a hierarchy's root, without the first slash.

    systemd's form, `slice:prefix:name`, stands for nested slices and a scope. Source: systemd.slice(5).
    """
    if cgroups_path.count(":") != 2 or "/" in cgroups_path:
        return os.path.normpath(f"/{cgroups_path}").lstrip("/")
    slice_, prefix, name = cgroups_path.split(":")
    parts = slice_.removesuffix(".slice").split("-")
    slices = [f"{'-'.join(parts[:count])}.slice" for count in range(1, len(parts) + 1)]
    return "/".join([*slices, f"{prefix}-{name}.scope" if prefix else f"{name}.scope"])


def scratch_mounts(work: str) -> list[Path]:
    """Return CRIU's mounts in a work directory of that name, wherever the directory is."""
    mounts = [mount.path for mount in read_mountinfo()]
    return [path for path in mounts if path.name.startswith(SCRATCH) and path.parent.name == work]


def _kill(pids: Iterable[int], deadline: float) -> None:
    """Send SIGKILL, and give those who must reap them a moment. Raises Failed beyond the deadline."""
    if time.monotonic() > deadline:
        raise Failed(f"processes {', '.join(map(str, pids))} of a failed checkpoint or restore do not end")
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    time.sleep(POLL_SECONDS)


def _remove_cgroup(directory: Path, deadline: float) -> None:
    """Remove a cgroup and those below it, once processes that are not listed any more have freed their memory, too."""
    for inner, _, _ in os.walk(directory, topdown=False):
        while not _removed(Path(inner)):
            if time.monotonic() > deadline:
                raise Failed(f"{inner} is still in use by processes that are ending")
            time.sleep(POLL_SECONDS)


def _removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True

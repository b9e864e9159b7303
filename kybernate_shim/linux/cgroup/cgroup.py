"""A container's cgroup, whichever version the host has: statistics, processes, freezer, end.

On a hybrid host the controllers are in hierarchies of version 1 and the unified one only tracks processes, so version 1
is used. Source: cgroups(7); the kernel's "Control Group v2" and "Control Groups version 1".
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.errors import Refused
from kybernate_shim.linux.cgroup.files import parse_table
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, directories, hierarchy_mounts
from kybernate_shim.linux.mount.mountinfo import read_cgroup_mounts

if TYPE_CHECKING:
    from kybernate_shim.messages import cgroup1_pb2, cgroup2_pb2

DECISIVE = ("memory", "cpu", "pids", "cpuset")  # where one of them is in version 1, runtimes use version 1
# The hierarchies that are asked for a container's processes, the one that the runtime itself uses first.
TRACKING = ("freezer", "pids", "memory", "devices", "cpu", "cpuacct", "cpuset", "blkio")
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.005, 0.2  # of version 1's freezer, which has no event
RUN_SECONDS = 0.001
KILL_SECONDS = 5.0  # in which new processes are looked for, where no call of the kernel kills all of them


def hierarchy_version() -> int:
    """Return the version of the cgroups that containers of this machine live in: 1 or 2."""
    return 1 if any(controller in hierarchy_mounts(read_cgroup_mounts()) for controller in DECISIVE) else 2


class FreezeTimedOut(Exception):
    """Some process of the cgroup did not stop in time; the cgroup has been thawed again."""


@dataclass(frozen=True)
class Cgroup:
    """One cgroup. `directories` is by controller in version 1 and has the one key "" in version 2."""

    version: int
    directories: Mapping[str, Path]

    @classmethod
    def of(cls, pid: int) -> Cgroup:
        """Return the cgroup of a process.

        Raises ProcessLookupError when the process has ended, FileNotFoundError when no hierarchy can be seen.
        """
        found = directories(pid)
        if any(controller in found for controller in DECISIVE):
            found.pop(UNIFIED, None)
            return cls(1, found)
        if UNIFIED not in found:
            raise FileNotFoundError(f"the cgroup of process {pid} is not below any mounted hierarchy")
        return cls(2, {UNIFIED: found[UNIFIED]})

    @classmethod
    def at(cls, directory: Path) -> Cgroup:
        """Return the cgroup whose `tracking` is that directory, which need not be there any more."""
        version = hierarchy_version()
        return cls(version, {TRACKING[0] if version == 1 else UNIFIED: directory})

    def path(self, controller: str = UNIFIED) -> Path:
        """Return the directory where `controller` has its files. Raises FileNotFoundError."""
        try:
            return self.directories[controller if self.version == 1 else UNIFIED]
        except KeyError:
            raise FileNotFoundError(f"no cgroup hierarchy for {controller!r}") from None

    @property
    def exists(self) -> bool:
        return any(path.is_dir() for path in self.directories.values())

    def stats(self) -> cgroup1_pb2.Metrics | cgroup2_pb2.Metrics:
        """Return what the cgroup has used. Raises FileNotFoundError when it is gone."""
        # Here, because `start` and `delete` move and thaw cgroups, and have no time for importing protobuf.
        from kybernate_shim.linux.cgroup import v1, v2

        return v1.read_metrics(self.directories) if self.version == 1 else v2.read_metrics(self.path())

    def processes(self) -> list[int]:
        """Return the pids in this cgroup and the ones below it, without order; empty when it is gone."""
        return _pids_below(self.tracking)

    def join(self, pid: int) -> None:
        """Move a process into the cgroup, in every hierarchy. Raises OSError."""
        for path in dict.fromkeys(self.directories.values()):
            _write(path / "cgroup.procs", str(pid))

    # -- Freezer ------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Whether every process in it is frozen. Raises OSError when it is gone."""
        if self.version == 1:
            return (self.path("freezer") / "freezer.state").read_text().strip() == "FROZEN"
        return bool(parse_table((self.path() / "cgroup.events").read_text()).get("frozen"))

    @property
    def is_held(self) -> bool:
        """Whether it is frozen, or being frozen: some of its processes may have stopped by then.

        Raises OSError when it is gone.
        """
        if self.version == 1:
            return (self.path("freezer") / "freezer.state").read_text().strip() != "THAWED"
        return (self.path() / "cgroup.freeze").read_text().strip() == "1"

    def freeze(self, *, timeout: float = 10.0) -> None:
        """Freeze every process and wait until all are frozen. Blocks.

        Raises FreezeTimedOut after `timeout` seconds (thawed again), Refused, or OSError when it is gone.
        """
        self._must_not_be_ours()
        deadline = time.monotonic() + timeout
        poll = POLL_SECONDS if self.version == 1 else 1.0
        self._set_frozen(True)
        while not self._await_freezer(max(0.0, min(poll, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                self.thaw()
                raise FreezeTimedOut(f"{self.tracking} was not frozen within {timeout:g} s")
            if self.version == 1:
                self._let_run()
                poll = min(2 * poll, LONGEST_POLL_SECONDS)  # many processes take long to stop

    def thaw(self) -> None:
        """Let the processes run again. Raises OSError when the cgroup is gone."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        if self.version == 1:
            _write(self.path("freezer") / "freezer.state", "FROZEN" if frozen else "THAWED")
        else:
            _write(self.path() / "cgroup.freeze", str(int(frozen)))

    def _let_run(self) -> None:
        """Thaw for a moment, and freeze again, on version 1.

        A thread that executes a program waits, where it cannot be frozen, for the end of its process's other threads,
        and those do not end while they are frozen. A process that was forked meanwhile may need a second attempt, too.
        """
        self._set_frozen(False)
        time.sleep(RUN_SECONDS)
        self._set_frozen(True)

    def _await_freezer(self, seconds: float) -> bool:
        """Wait until all is frozen, for at most so long, and return whether it is."""
        if self.version == 1:
            deadline = time.monotonic() + seconds
            while not self.frozen and time.monotonic() < deadline:
                time.sleep(seconds / 10)
            return self.frozen
        with (self.path() / "cgroup.events").open() as events:
            poll = select.poll()
            poll.register(events, select.POLLPRI)
            if not parse_table(events.read()).get("frozen"):
                poll.poll(seconds * 1000)
        return self.frozen

    # -- End ----------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Send SIGKILL to every process, thawing what is frozen; they may take a moment to be gone.

        Raises Refused. A cgroup that is gone is no error.
        """
        self._must_not_be_ours()
        try:
            if self.version == 2:
                _write(self.path() / "cgroup.kill", "1")
                self.thaw()  # frozen ones die, too, but runc would report the empty cgroup as paused
                return
        except OSError:
            pass  # before Linux 5.14, or gone
        self._kill_each()

    def _kill_each(self) -> None:
        """Signal until the cgroup lists no new process: processes may fork while the list is processed.

        They are being frozen meanwhile, and so fork no faster than they are listed.
        """
        with suppress(OSError):
            self._set_frozen(True)
        killed: set[int] = set()
        until = time.monotonic() + KILL_SECONDS
        try:
            while (new := set(self.processes()) - killed) and time.monotonic() < until:
                for pid in new:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed |= new
        finally:
            with suppress(OSError):
                self.thaw()  # a frozen process of version 1 dies only once it may run

    @property
    def tracking(self) -> Path:
        """The directory that lists the processes, the freezer's where version 1 has one."""
        if self.version == 2:
            return self.path()
        known = [self.directories[controller] for controller in TRACKING if controller in self.directories]
        return next((path for path in known if path.is_dir()), known[0])

    def _must_not_be_ours(self) -> None:
        if os.getpid() in self.processes():
            raise Refused(f"process {os.getpid()} is itself in {self.tracking}")


def join_shim_cgroup(path: str, pid: int) -> None:
    """Move a process into the existing cgroup `path`, on version 1 in each hierarchy that has it.

    Raises FileNotFoundError when none has it.
    """
    name = path.strip("/")
    mounts = hierarchy_mounts(read_cgroup_mounts())
    legacy = [group[0].path for controller, group in mounts.items() if controller in TRACKING]
    roots = legacy or [group[0].path for controller, group in mounts.items() if controller == UNIFIED]
    targets = [root / name for root in dict.fromkeys(roots) if (root / name / "cgroup.procs").exists()]
    if not targets:
        raise FileNotFoundError(
            f"shim_cgroup {path!r}: no such cgroup below {', '.join(map(str, roots)) or 'any mount'}"
        )
    for target in targets:
        _write(target / "cgroup.procs", str(pid))


def _pids_below(root: Path) -> list[int]:
    pids: set[int] = set()
    for directory, _, _ in os.walk(root):
        try:
            pids.update(map(int, (Path(directory) / "cgroup.procs").read_text().split()))
        except OSError:
            pass  # a threaded cgroup, whose processes its parent lists, or one that has just been removed
    return sorted(pids - {0})  # 0 stands for a process outside our pid namespace


def _write(path: Path, text: str) -> None:
    """Write with one write(2), which is what the kernel takes as one command; never create the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

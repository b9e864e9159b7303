"""The processes of either shim on the node, and the state of the node that a figure of starting depends on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kybernate_shim.known_versions import KNOWN
from tests.lab.node import Containerd
from tests.system.ctr import KYBERNATE, Ctr, eventually

FORK_SERVER = "kybernate-fork"
DAEMONS = {KYBERNATE: "kybernate-shim"}  # the name of every other shim's begins with:
STOCK_NAME = "containerd-shim"
CONFIG = Path("/etc/kybernate/shim.toml")
OWN_CGROUP = "bench"


def named(name: str) -> list[psutil.Process]:
    """Return the processes whose name begins so."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith(name)]


def daemons(ctr: Ctr) -> list[psutil.Process]:
    """Return the daemons of the shim that `ctr` uses."""
    return named(DAEMONS.get(ctr.runtime, STOCK_NAME))


def make_cold() -> None:
    """End the fork server and forget what was asked of programs, as on a node that has just booted."""
    shutil.rmtree(KNOWN, ignore_errors=True)
    for process in named(FORK_SERVER):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    eventually(lambda: not named(FORK_SERVER))


def settle() -> None:
    """Have a fork server that has done all that it does beforehand, unless there is to be none."""
    Ctr().run("true")
    if not CONFIG.exists():
        eventually(_settled, seconds=60)


def _settled() -> bool:
    """Tell whether there are the server and the process for its next client; a successor comes in addition, once."""
    return len(named(FORK_SERVER)) == 2


@contextmanager
def without_fork_server() -> Iterator[None]:
    """Let every `start` do its work itself."""
    CONFIG.parent.mkdir(parents=True, exist_ok=True)
    CONFIG.write_text("fork_server_idle = 0\n")
    make_cold()
    try:
        yield
    finally:
        CONFIG.unlink()


class CpuMeter:
    """The CPU time of all that containerd starts, shims and runtimes, in a cgroup that it is moved to.

    Containers have cgroups of their own. A fork server that ran before is elsewhere, so it is ended.
    """

    def __init__(self) -> None:
        legacy = next((path for path in Path("/sys/fs/cgroup").glob("*cpuacct*") if path.is_dir()), None)
        self._cgroup = (legacy or Path("/sys/fs/cgroup")) / OWN_CGROUP
        self._cgroup.mkdir(exist_ok=True)
        self._containerd = psutil.Process(Containerd().pid)
        (self._cgroup / "cgroup.procs").write_text(str(self._containerd.pid))
        make_cold()
        settle()

    def seconds(self) -> float:
        """Return what has been used so far by others than containerd itself."""
        own = self._containerd.cpu_times()
        return self._used() - own.user - own.system

    def _used(self) -> float:
        if (usage := self._cgroup / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        table = dict(line.split() for line in (self._cgroup / "cpu.stat").read_text().splitlines())
        return int(table["usage_usec"]) / 1e6

    def close(self) -> None:
        """Put everything back; shims that still run may keep the cgroup."""
        parent = self._cgroup.parent / "cgroup.procs"
        for pid in (self._cgroup / "cgroup.procs").read_text().split():
            with suppress(OSError):
                parent.write_text(pid)
        with suppress(OSError):
            os.rmdir(self._cgroup)  # noqa: PTH106

"""The process of containerd on this node, and the files that configure it, as an administrator would look for them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.process import is_nodes_own

UNIT: Final = re.compile(r"/([^/]+\.service)(?:/|$)")
DEFAULT_CONFIGURATION: Final = Path("/etc/containerd/config.toml")
AWAITED: Final = Path("/run/kybernate-setup/containerd")  # names the process that does not know its configuration yet
STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ContainerdProcess:
    """A containerd that runs. `unit` is its systemd service, "" where systemd does not run it.

    `since` is in seconds since 1970. `path` is the PATH that it searches for shims, "" where only root may read it.
    `halted`: a signal or a debugger has stopped it.
    """

    pid: int
    since: float
    program: str
    configuration: Path
    unit: str = ""
    path: str = ""
    halted: bool = False


def find_process() -> ContainerdProcess | None:
    """Return the containerd of this node, without those of nodes that run in containers; None where none runs."""
    for process in _processes():
        try:
            with process.oneshot():
                return ContainerdProcess(
                    process.pid,
                    process.create_time(),
                    _program(process),
                    _configured(process.cmdline()) or DEFAULT_CONFIGURATION,
                    _unit_of(process.pid),
                    _path_of(process),
                    process.status() in STOPPED,
                )
        except psutil.NoSuchProcess:
            continue
    return None


def is_alive(found: ContainerdProcess) -> bool:
    """Return whether this process is still there."""
    try:
        return psutil.Process(found.pid).create_time() == found.since
    except psutil.Error:
        return False


def is_awaited(found: ContainerdProcess) -> bool:
    """Return whether a setup has written a configuration that this process has not read."""
    try:
        return AWAITED.read_text() == f"{found.pid} {found.since}"
    except OSError:
        return False


def imported_files(main: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that a main file imports by these patterns, in containerd's order. Raises OSError."""
    found: list[Path] = []
    for pattern in patterns:
        at = main.parent / pattern
        found += sorted(at.parent.glob(at.name))
    return found


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "containerd" and is_nodes_own(process.pid):
            yield process


def _program(process: psutil.Process) -> str:
    try:
        return process.exe().removesuffix(" (deleted)")
    except psutil.AccessDenied:
        return shutil.which("containerd") or ""


def _path_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("PATH", os.defpath)
    except (psutil.AccessDenied, OSError):
        return ""


def _configured(cmdline: Sequence[str]) -> Path | None:
    """Return the main file that a command line of containerd names."""
    for word, following in pairwise([*cmdline, ""]):
        if word in ("-c", "--config") and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None


def _unit_of(pid: int) -> str:
    if not Path("/run/systemd/system").is_dir():
        return ""
    found = UNIT.findall(text_of(f"/proc/{pid}/cgroup"))
    return str(found[-1]) if found else ""

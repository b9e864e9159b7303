"""What changes rarely on a node: versions of programs, and what `kybernate doctor` finds."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import psutil

from kybernate.messages import agent_pb2 as api
from kybernate.node.containerd import ContainerdRefused, ContainerdUnreachable
from kybernate.node.finding import HealthFinding
from kybernate.node.health import examine
from kybernate_shim import __version__
from kybernate_shim.arena.memory import Memory
from kybernate_shim.config import Config

REFRESH_SECONDS = 3600.0
PROGRAM_SECONDS = 20
PROGRAMS = ("criu", "runc", "crun")
LEVELS = {"ok": "ok", "note": "warning", "bad": "error"}  # of a finding: its level in the agent's message


@dataclass(frozen=True)
class Facts:
    """Versions by program, and findings."""

    versions: dict[str, str] = field(default_factory=dict)
    findings: tuple[api.Finding, ...] = ()


class NodeFacts:
    """The facts of the last look, which is taken at the start, each hour, and on demand."""

    def __init__(
        self,
        containerd_version: Callable[[], Awaitable[str]],
        config: Callable[[], Config],
        *,
        look: Callable[[], list[HealthFinding]] = examine,
    ) -> None:
        self.current = Facts()
        self._containerd_version, self._config, self._look = containerd_version, config, look

    async def run(self) -> None:
        """Look every hour until this is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Look now; that starts programs, and takes some seconds."""
        found = await asyncio.to_thread(self._look)
        versions = await asyncio.to_thread(program_versions, str(self._config().criu or "criu"))
        try:
            versions["containerd"] = await self._containerd_version()
        except (ContainerdUnreachable, ContainerdRefused):
            pass  # the event `containerd.lost` says so
        self.current = Facts(versions, tuple(finding_messages(found)))


def finding_messages(found: Iterable[HealthFinding]) -> list[api.Finding]:
    """Return the doctor's findings as messages."""
    return [
        api.Finding(check=one.subject, level=LEVELS[one.verdict], message=one.found, advice=one.advice) for one in found
    ]


def program_versions(criu: str) -> dict[str, str]:
    """Return the versions of kernel, Kybernate and programs; a program that does not run is left out."""
    versions = {"kybernate": __version__, "kernel": os.uname().release}
    for name in PROGRAMS:
        path = shutil.which(criu if name == "criu" else name)
        version = _version(path) if path is not None else ""
        if version:
            versions[name] = version
    return versions


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(rb"[Vv]ersion:?\s+v?(\S+)", done.stdout)
    return found[1].decode(errors="replace") if found else ""


def memory_message(config: Config) -> api.HostMemory:
    """Return the machine's memory now, and the arena's part of it."""
    machine = psutil.virtual_memory()
    message = api.HostMemory(total_bytes=machine.total, available_bytes=machine.available)
    arena = Memory(config.gpu.arena)
    try:
        message.arena_bytes = sum(bank.extent.size for bank in arena.banks)
        message.arena_used_bytes = message.arena_bytes - arena.free() if message.arena_bytes else 0
    except OSError:
        pass  # the doctor's findings say so
    return message

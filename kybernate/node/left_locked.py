"""Processes that a shim has left locked, or off their GPUs, because it was killed between two steps.

containerd ends the containers of a dead shim. Where it does not, being away itself or failing at it, they would wait
for ever. What the shim has noted in a bundle says where to look; in which state a process is, the driver is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.address import answers
from kybernate_shim.cuda.client import SOCKET, State, cuda_helper
from kybernate_shim.cuda.sequence import bring_back
from kybernate_shim.oci.bundle import Bundle

BUNDLES = Path("/run/containerd/io.containerd.runtime.v2.task")  # by containerd's namespace and id


@dataclass(frozen=True)
class LeftLocked:
    """Processes of a container, as the host sees them, that no shim works on; their states are the driver's words."""

    namespace: str
    container: str
    states: dict[int, str]

    def __str__(self) -> str:
        told = ", ".join(f"process {pid} is {state}" for pid, state in self.states.items())
        return f"container {self.container} (namespace {self.namespace}): {told}, and its shim is dead"


def find(bundles: Path = BUNDLES, socket: Path = SOCKET) -> list[LeftLocked]:
    """Return them, by container. Raises CudaError where the driver has to be asked and does not tell."""
    noted = [(bundle, pids) for bundle in sorted(bundles.glob("*/*")) if (pids := _noted(Bundle(bundle)))]
    return asyncio.run(_find(noted, socket)) if noted else []


def repair(left: LeftLocked, socket: Path = SOCKET) -> list[str]:
    """Let its processes compute again; return what is wrong with those that do not. Raises CudaError."""

    async def body() -> list[str]:
        async with cuda_helper(socket) as helper:
            return await bring_back(helper, list(left.states))

    return asyncio.run(body())


def _noted(bundle: Bundle) -> list[int]:
    """Return the processes that a dead shim has noted, and that are still those of its container."""
    remains = bundle.remains()
    if remains is None or not remains.locked_pids or _lives(bundle.path):
        return []
    return [pid for pid in remains.locked_pids if bundle.path.name in _cgroup(pid)]


def _lives(bundle: Path) -> bool:
    try:
        return answers(Path((bundle / "address").read_text().strip().removeprefix("unix://")))
    except OSError:
        return False


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


async def _find(noted: Sequence[tuple[Path, list[int]]], socket: Path) -> list[LeftLocked]:
    found = []
    async with cuda_helper(socket) as helper:
        for bundle, pids in noted:
            states = await helper.states(pids)
            away = {one.pid: one.state.name.lower() for one in states.processes.values()}
            away = {pid: state for pid, state in away.items() if state != State.RUNNING.name.lower()}
            away |= dict.fromkeys(states.unknown, "unknown")
            if away:
                found.append(LeftLocked(bundle.parent.name, bundle.name, away))
    return found

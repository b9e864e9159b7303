"""Processes that a shim has left locked, off their GPUs, or frozen, because it was killed between two steps.

containerd ends the containers of a dead shim. Where it does not, being away itself or failing at it, they would wait
forever. What the shim has recorded in a bundle says where to look; in which state a process is, the driver is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.address import answers
from kybernate_shim.gpu.evidence import holds_driver
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import SOCKET, cuda_helper
from kybernate_shim.gpu.sequence import bring_back
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.bundle import Bundle

BUNDLES = Path("/run/containerd/io.containerd.runtime.v2.task")  # by containerd's namespace and id
AT_WORK = ("checkpoint", "restore", "suspend", "resume")  # phases in which a frozen container is frozen by its shim


@dataclass(frozen=True)
class LeftLocked:
    """Processes of a container, as the host sees them, that no shim works on.

    Their states are the driver's words, or "frozen": such a one does not answer. Unless they are `whole`, a part of
    their memory is in a checkpoint image only, and they can never compute again.
    """

    namespace: str
    container: str
    states: Mapping[int, str]
    cgroup: Cgroup
    whole: bool = True

    def __str__(self) -> str:
        states = ", ".join(f"process {pid} is {state}" for pid, state in self.states.items())
        lost = "" if self.whole else ", and a part of its memory is in an unfinished checkpoint or restore"
        return f"container {self.container} (namespace {self.namespace}): {states}, and its shim is dead{lost}"


@dataclass(frozen=True)
class _Recorded:
    """What a dead shim has recorded in a bundle, as far as it is still so."""

    bundle: Path
    cgroup: Cgroup
    locked: Sequence[int]
    whole: bool
    frozen: Sequence[int] = field(default=())


def find(bundles: Path = BUNDLES, socket: Path = SOCKET) -> list[LeftLocked]:
    """Return them, by container. Raises CudaError where the driver has to be asked and does not answer."""
    recorded = [one for bundle in sorted(bundles.glob("*/*")) if (one := _recorded(Bundle(bundle)))]
    return asyncio.run(_find(recorded, socket)) if recorded else []


def repair(left: LeftLocked, socket: Path = SOCKET) -> list[str]:
    """Let its processes compute again, or end them where they never can; return what is wrong with the others.

    Raises CudaError, and OSError where the container cannot be thawed or ended.
    """
    if not left.whole:
        left.cgroup.kill()
        return []
    if left.cgroup.is_held:
        left.cgroup.thaw()
    pids = [pid for pid in left.states if holds_driver(pid)]
    return asyncio.run(_bring_back(pids, socket)) if pids else []


def _recorded(bundle: Bundle) -> _Recorded | None:
    """Return what a dead shim has recorded of processes that are still those of its container."""
    cleanup_record = bundle.cleanup_record()
    if cleanup_record is None or not cleanup_record.cgroup or _lives(bundle.path):
        return None
    cgroup = Cgroup.at(Path(cleanup_record.cgroup))
    there = cgroup.processes()
    locked = [pid for pid in cleanup_record.locked_pids if pid in there]
    waiting = bool(locked) or cleanup_record.phase in AT_WORK
    frozen = there if waiting and _frozen(cgroup) else []
    return _Recorded(bundle.path, cgroup, locked, cleanup_record.whole, frozen) if locked or frozen else None


def _lives(bundle: Path) -> bool:
    try:
        return answers(Path((bundle / "address").read_text().strip().removeprefix("unix://")))
    except OSError:
        return False


def _frozen(cgroup: Cgroup) -> bool:
    try:
        return cgroup.is_held  # or still being frozen, by a shim that was killed meanwhile
    except OSError:
        return False


async def _bring_back(pids: Sequence[int], socket: Path) -> list[str]:
    async with cuda_helper(socket) as helper:
        return await bring_back(helper, pids)


async def _find(recorded: Sequence[_Recorded], socket: Path) -> list[LeftLocked]:
    found = []
    async with cuda_helper(socket) as helper:
        for one in recorded:
            away = dict.fromkeys(one.frozen, "frozen")
            if not away:
                states = await helper.states(one.locked)
                away = {it.pid: it.state.name.lower() for it in states.processes.values()}
                away = {pid: state for pid, state in away.items() if state != State.RUNNING.name.lower()}
                away |= dict.fromkeys(states.unknown, "unknown")
            if away:
                found.append(LeftLocked(one.bundle.parent.name, one.bundle.name, away, one.cgroup, one.whole))
    return found

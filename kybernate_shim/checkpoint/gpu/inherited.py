"""Forked children of a container's CUDA processes, which CRIU could not dump with what they have inherited.

Such are the workers of PyTorch's DataLoader: they never use CUDA, but hold mappings and descriptors of NVIDIA's
devices, and the driver's checkpoint clears their parent only. Before a dump they give that up; who can be proven to
have inherited it is `gpu.inheritors`'s to say, how it is done `vram_mover.release`'s. A suspend alone needs nothing of
this, but takes the proofs: a checkpoint that follows finds the files of the parent closed, or opened again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from kybernate_shim.checkpoint.gpu.usage import inner_pid
from kybernate_shim.checkpoint.image.manifest import Released
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.inheritors import Inheritors, identity, ticks
from kybernate_shim.gpu.mover_client import VramMover, vram_mover
from kybernate_shim.gpu.processes import cuda_processes
from kybernate_shim.linux import nvidia_devices
from kybernate_shim.linux.cgroup.headroom import headroom
from kybernate_shim.linux.nvidia_devices import LOOK_SECONDS, DeviceFiles
from kybernate_shim.linux.own_thread import in_own_thread
from kybernate_shim.linux.process import name_of, title_of
from kybernate_shim.logs import Log
from kybernate_shim.worker_protocol import mover_jobs

PATIENCE: Final = 5.0  # seconds for a process that is about to end, or to execute a program, or runs nvidia-smi
SECONDS: Final = 60.0  # for all of it, also where new processes keep appearing
PAUSE: Final = 0.02
KEEPS: Final = (
    "keeps inherited device files of GPUs open, which CRIU cannot dump: {}. End the process, or try again when"
    " the reason is gone"
)
OWN: Final = (
    "is its own, not inherited from a process with CUDA state: CRIU cannot dump it. Where the process uses NVML, let"
    " it call nvmlShutdown, or end the process; where it is initializing CUDA, or was forked long before, try"
    " again later"
)


@dataclass
class Inherited:
    """What is known of the processes of one container; `observe` before each of the driver's checkpoints."""

    target: Target
    log: Log
    inheritors: Inheritors = field(default_factory=Inheritors)
    owners: frozenset[int] = frozenset()  # the processes with CUDA state

    async def observe(self, owners: Iterable[int]) -> None:
        """Take the proofs; `owners` have CUDA state, and hold their files still unless they are suspended already."""
        self.owners = frozenset(owners)
        try:
            self.inheritors = await in_own_thread(self._observed, LOOK_SECONDS)
        except (OSError, TimeoutError) as error:  # a later release finds no proof then, and says so
            self.log.warning("device_files.not_examined", task=self.target.id, error=str(error))

    def _observed(self) -> Inheritors:
        """Return what is known with the proofs of this moment; a thread that is left behind changes nothing."""
        moment = ticks()
        found = nvidia_devices.look_all(self.pids(), nvidia_devices.node_majors())
        owners = [one for one in found if one.pid in self.owners]
        known = Inheritors(dict(self.inheritors.owners), dict(self.inheritors.proven))
        known.observe(owners, [one for one in found if one.pid not in self.owners], moment)
        return known

    async def holding(self) -> list[DeviceFiles]:
        """Return what processes without CUDA state hold of the devices. Raises Refused after too long."""
        try:
            return await in_own_thread(self._holding, LOOK_SECONDS)
        except TimeoutError as error:
            why = str(error) or f"its processes could not be examined within {LOOK_SECONDS:g} s"
            raise Refused(f"{why}; container {self.target.id} continues as before") from error

    def _holding(self) -> list[DeviceFiles]:
        return nvidia_devices.look_all(
            [pid for pid in self.pids() if pid not in self.owners], nvidia_devices.node_majors()
        )

    def pids(self) -> list[int]:
        """Return the processes of the container."""
        return self.target.cgroup.processes() if self.target.cgroup is not None else []


class InheritedRelease:
    """What the processes give up for one dump. `done` is for the manifest."""

    def __init__(self, inherited: Inherited, helper: CudaHelper) -> None:
        self.done: dict[int, Released] = {}
        self._inherited = inherited
        self._helper = helper
        self._until = 0.0

    async def needed(self) -> bool:
        """Return whether some process holds what CRIU cannot dump; for sure only where all are frozen."""
        return bool(await self._inherited.holding())

    async def run(self, operation: Operation) -> None:
        """Have each process give up what it has inherited; they must run, not be frozen.

        Call it again where one is found as soon as all are frozen. Raises Refused where a process keeps
        something, and where new ones keep appearing.
        """
        now = time.monotonic()
        self._until = self._until or now + SECONDS
        if now > self._until:
            raise Refused(self._failure({}))
        if not await self.needed():
            return
        patient = min(now + PATIENCE, self._until)
        with operation.step("release") as step:
            async with AsyncExitStack() as stack:
                workers: list[VramMover] = []  # at most one, started when there is something to do
                while holding := await self._inherited.holding():
                    kept = await self._unproven(holding)
                    if inheritors := [one for one in holding if one.pid not in kept]:
                        if not workers:
                            workers.append(await stack.enter_async_context(vram_mover(self._target.children)))
                        before = len(self.done)
                        kept |= await self._release(workers[0], inheritors)
                        if len(self.done) > before and time.monotonic() < self._until:
                            continue
                    if time.monotonic() > patient:
                        raise Refused(self._failure(kept))
                    await asyncio.sleep(PAUSE)
            step.bytes = sum(one.kept_bytes for one in self.done.values())

    @property
    def _target(self) -> Target:
        return self._inherited.target

    async def _unproven(self, holding: Sequence[DeviceFiles]) -> dict[int, str]:
        """Return which processes must be left alone, and why. Raises Refused where one has CUDA state by now."""
        started = await cuda_processes(self._helper, [one.pid for one in holding])
        if started:
            raise Refused(
                f"process {title_of(started[0].pid)} has begun to use CUDA after the others were checkpointed: try"
                f" again; container {self._target.id} continues as before"
            )
        self._inherited.inheritors.follow(one.pid for one in holding)
        found = {}
        for one in holding:
            if own := one.descriptors - self._inherited.inheritors.inherited_of(one):
                found[one.pid] = f"holds {one}; descriptor {min(own)} {OWN}"
        return found

    async def _release(self, worker: VramMover, inheritors: Sequence[DeviceFiles]) -> dict[int, str]:
        """Return which processes keep something, and why."""
        assert self._target.cgroup is not None
        room = headroom(self._target.cgroup)
        needed = sum(one.host_bytes for one in inheritors)
        if needed > room.bytes:
            raise Refused(
                f"{len(inheritors)} forked processes have inherited {needed >> 20} MiB of pinned memory,"
                " of which each needs"
                f" its own copy for a checkpoint; {room.limit} leaves {room.bytes >> 20} MiB: allow more, or fork them"
                f" before the memory is pinned; container {self._target.id} continues as before"
            )
        names = {one.pid: (inner_pid(one.pid), name_of(one.pid)) for one in inheritors}
        answers = await worker.ask(
            mover_jobs.Release(
                heirs=self._jobs(inheritors),
                owners=sorted(self._inherited.owners),
                majors=sorted(nvidia_devices.node_majors()),
                seconds=self._until - time.monotonic(),
            )
        )
        kept = {}
        for answer in answers:
            pid, given = answer.pid, answer.given
            if given is None:
                kept[pid] = KEEPS.format(answer.kept)
            elif (inner := names[pid][0]) is not None:
                cost = {
                    "mappings": given.mappings,
                    "bytes": given.bytes,
                    "kept_bytes": given.kept_bytes,
                    "descriptors": given.descriptors,
                }
                self.done[pid] = Released(pid=inner, name=names[pid][1], **cost)
                self._inherited.log.info("device_files.released", task=self._target.id, pid=pid, **cost)
        return kept

    def _jobs(self, inheritors: Sequence[DeviceFiles]) -> list[mover_jobs.Inheritor]:
        """Return what the worker is to do; not to a process that has got the pid of one that has ended."""
        found = {one.pid: identity(one.pid) for one in inheritors}
        members = self._inherited.pids()
        return [
            mover_jobs.Inheritor(one.pid, who.started, self._inherited.inheritors.inherited_of(one), one.host_bytes)
            for one in inheritors
            if (who := found[one.pid]) is not None and one.pid in members
        ]

    def _failure(self, kept: dict[int, str]) -> str:
        reasons = [f"process {title_of(pid)} {why}" for pid, why in kept.items()]
        reasons = reasons or ["processes that have inherited device files of GPUs keep appearing"]
        return "; ".join([*reasons, f"container {self._target.id} continues as before"])

"""A container's processes leave their GPUs, for a checkpoint or in place, and come back to these or to others.

The order of the driver's steps and their undo is `gpu.sequence`'s; here is what a container adds: who its processes
are, whether they would survive, what a manifest says of them, the word that its bundle keeps of locked processes, and
the GPUs that its new place has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from kybernate_shim.checkpoint.gpu.arena import ArenaOffload
from kybernate_shim.checkpoint.gpu.attachment import Attachment
from kybernate_shim.checkpoint.gpu.container_gpus import ContainerGpus, RecordLocked
from kybernate_shim.checkpoint.gpu.errors import NothingToResume
from kybernate_shim.checkpoint.gpu.inherited import InheritedRelease
from kybernate_shim.checkpoint.gpu.leaving import Leaving
from kybernate_shim.checkpoint.gpu.left import Left, joined
from kybernate_shim.checkpoint.gpu.parking import bring_back, park
from kybernate_shim.checkpoint.gpu.room import ahead, ahead_in_room, arriving_room, await_room, bytes_on, needs
from kybernate_shim.checkpoint.gpu.usage import inner_pid
from kybernate_shim.checkpoint.gpu.vram import BytesLost, VramOffload, prefaulted
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack, Target
from kybernate_shim.errors import Refused
from kybernate_shim.gpu import gpu_map, sequence
from kybernate_shim.gpu.claims import claimed
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.gpu_map import GpuMismatch
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.processes import cuda_processes
from kybernate_shim.logs import Log
from kybernate_shim.steps import Step
from kybernate_shim.vram_io.digest import KIND, STRONG


class CudaAccelerator:
    """Takes the processes of one container off their GPUs, and brings them back. `record` is as for ContainerGpus."""

    def __init__(self, target: Target, record: RecordLocked, log: Log) -> None:
        self._gpus = ContainerGpus(target, record, log)
        self._leaving = Leaving(self._gpus)
        self._lost = ""  # why processes that are off their GPUs must never come back to them
        attachment = Attachment(self._gpus)
        self.compare, self.expecting, self.attach = attachment.compare, attachment.expecting, attachment.attach

    @property
    def suspended(self) -> Left | None:
        """What `suspend` has taken out, until `resume`."""
        return self._gpus.suspended

    @asynccontextmanager
    async def detached(
        self, operation: Operation, image: Path, *, force: bool, strong: bool = False
    ) -> AsyncIterator[Left]:
        """Keep the processes off their GPUs while the context lasts; they must run, not be frozen, at both ends.

        Some of their bytes may be in files of `image` then; `strong`: with digests that find forgery.

        Raises Refused with the container as it was, and NotBack when it could not be brought
        back in the end. A container that was suspended before stays so.
        """
        await self._unpark(operation)
        digest = STRONG if strong else KIND
        way = VramOffload(self._gpus.target.children, self._gpus.settings, self._gpus.log, digest)
        async with self._gpus.helper() as helper, aclosing(way):
            left = await self._leaving.leave(
                helper,
                operation,
                around=lambda size: partial(way.watching, image=image, size=size),
                driven=lambda: way.driven,
                force=force,
                arena=self._gpus.settings.data_path == "fast",
            )
            left.way = way
            left.note_whole = partial(self._gpus.note_whole, left)
            left.inheritance = InheritedRelease(self._leaving.inherited, helper)
            try:
                sizes = await self._leaving.arena_sizes(helper)
                left.away = ArenaOffload(self._gpus.target.children, self._gpus.settings, sizes, digest)
                yield left
            except BytesLost as error:
                self._lost = f"{error}; the processes of container {self._gpus.target.id} cannot continue: end it"
                raise NotBack(self._lost) from error
            except BaseException as error:
                await sequence.undisturbed(self._undo(helper, left, error))
                raise
            if left.gone:
                self._gpus.record(())
            elif left.pids:  # what was suspended before needs no room on a GPU now
                # Not to be cut short by a deadline: the image is complete, and the container must not stay locked.
                await sequence.undisturbed(self._return(helper, left, operation, self._gpus.limits))

    async def suspend(self, operation: Operation, *, force: bool, lock_seconds: float = 0) -> Left:
        """Take all processes off their GPUs until `resume`; nothing to do for those that are off already.

        Raises Refused, with the container as it was.
        """
        async with self._gpus.helper() as helper:
            left = await self._leaving.leave(
                helper,
                operation,
                around=lambda size: partial(self._prefaulted, size=size),
                force=force,
                lock_seconds=lock_seconds,
                arena=True,
            )
            operation.commit()  # no await since the last step: a cancel came before, and was undone, or comes too late
            if left.pids:
                self._gpus.suspended = joined(self._gpus.suspended, left)
        if self._gpus.suspended is None:
            raise Refused(f"no process of container {self._gpus.target.id} holds CUDA state")
        return left

    async def park(self, operation: Operation) -> Left:
        """Move what the arena has of a suspended container to the disk, until `resume`; again is no error.

        Raises Refused, with the container suspended as it was.
        """
        left = self._gpus.suspended
        if left is None:
            raise Refused(f"container {self._gpus.target.id} is not suspended: only what is suspended can be parked")
        assert self._gpus.target.cgroup is not None
        there = self._gpus.target.cgroup.processes()  # the pid of one that has ended may be any other's by now
        pids = [pid for pid in left.pids if pid in there]
        if not await park(self._gpus.target, pids, operation, left.parked) and not left.parked:
            raise Refused(
                f"container {self._gpus.target.id} has no VRAM in the arena, and nothing else is parked; it stays"
                " suspended. `kybernate suspend` says why it has none there, `gpu.arena` and kybernate.io/arena give it"
            )
        return left

    async def _unpark(self, operation: Operation) -> None:
        """Have in host memory again what is parked. Raises Refused, with the rest parked as before."""
        left = self._gpus.suspended
        while left is not None and left.parked:
            try:
                await bring_back(self._gpus.target, left.parked[-1], operation)
            finally:
                if not left.parked[-1].away():
                    left.parked.pop()

    def discard(self) -> None:
        """Remove what is parked of processes that have ended. Blocks."""
        for parked in self._gpus.suspended.parked if self._gpus.suspended is not None else ():
            parked.remove()

    async def resume(self, operation: Operation, *, restore_seconds: float = 0, room_seconds: float = 0) -> Left:
        """Bring back every process that waits for its GPU, by whatever means it was taken off.

        For `room_seconds` it waits until the GPUs have the room, with all done before that needs less of it: another
        container may be leaving just now.

        Where the driver's restore takes longer than `restore_seconds`, if that is given, and than the configured limit
        in a second attempt, the container stays suspended.
        Raises NothingToResume, GpuMismatch where the GPUs have not enough room, and NotBack.
        """
        if self._lost:
            raise NotBack(self._lost)
        async with self._gpus.helper() as helper:
            waiting = await self._gpus.in_state(helper, State.CHECKPOINTED, State.LOCKED)
            if not waiting:
                await asyncio.to_thread(self.discard)
                self._gpus.suspended = None  # another client has brought them back, or they have ended
                raise NothingToResume(f"no process of container {self._gpus.target.id} waits for its GPU")
            await self._unpark(operation)
            left = self._gpus.suspended or Left(pids=[process.pid for process in waiting])
            left.pids = [process.pid for process in waiting]
            limits = replace(self._gpus.limits, restore=restore_seconds or self._gpus.limits.restore)
            try:
                await self._return(helper, left, operation, limits, room_seconds)
            except asyncio.CancelledError:
                if not await sequence.undisturbed(self._back_after_cancel(helper, left)):
                    raise
            operation.commit()
            self._gpus.suspended = None
        return left

    @asynccontextmanager
    async def _prefaulted(self, pids: Sequence[int], offloaded: int, *, size: int) -> AsyncIterator[bool]:
        async with prefaulted(self._gpus.target.children, self._gpus.settings, self._gpus.log, pids, size - offloaded):
            yield False  # of the threads, the driver's are watched, and none is stopped

    async def _undo(self, helper: CudaHelper, left: Left, cause: BaseException) -> None:
        stuck = await sequence.bring_back(helper, left.pids, self._gpus.limits)
        if not stuck:
            self._gpus.record_more((), back=left.pids)
            return
        why = str(cause) or "it was cancelled"
        raise NotBack(f"{why}; and the container is not back on its GPU: {'; '.join(stuck)}") from cause

    async def _return(
        self,
        helper: CudaHelper,
        left: Left,
        operation: Operation,
        limits: sequence.StepSeconds,
        room_seconds: float = 0,
    ) -> None:
        """Bring back what is checkpointed, and unlock what is only locked."""
        steps: list[Step] = []
        try:
            async with claimed({gpu.uuid: bytes_on(gpu) for gpu in left.gpus}) as claim:
                waiting = await self._gpus.in_state(helper, State.CHECKPOINTED, State.LOCKED, among=left.pids)
                locked = [process.pid for process in waiting if process.state is State.LOCKED]
                await helper.unlock(locked, limits.unlock)
                pids = [process.pid for process in waiting if process.state is State.CHECKPOINTED]
                at_first, later = needs(left.gpus, waiting, split=room_seconds > 0)
                node = await await_room(helper, at_first, room_seconds, claim)
                crowded = bool(claim.others())
                claim.grant()
                self._gpus.warn_of_neighbours(node, at_first.keys())
                plan = gpu_map.GpuPlan((), {gpu.uuid: bytes_on(gpu) for gpu in left.gpus})
                names = {name: pid for pid in pids if (name := inner_pid(pid)) is not None}
                with operation.showing("cuda-resume"):
                    first, coming = arriving_room(later, room_seconds, alone=not crowded)
                    room = partial(await_room, helper, first, room_seconds, claim) if first else None
                    early = ahead(left.gpus, names, plan, node) or ahead_in_room(coming, waiting, at_first)
                    steps = await sequence.resume(
                        helper, pids, limits=limits, room=room, coming=coming, ahead=early, taken=claim.end
                    )
        except GpuMismatch as error:
            self._gpus.suspended = left
            raise NotBack(f"{error}; until then the container stays suspended, `kybernate resume` retries") from error
        except CudaError as error:
            await self._return_anyway(helper, left, error)
        self._gpus.record_more((), back=left.pids)
        operation.add_steps(steps, "cuda-restore", left.vram_bytes)

    async def _back_after_cancel(self, helper: CudaHelper, left: Left) -> bool:
        """Return whether all compute after a resume that was cancelled, False where they are suspended as before.

        Raises NotBack where some are neither, and cannot be brought back.
        """
        assert self._gpus.target.cgroup is not None
        there = set(left.pids).intersection(self._gpus.target.cgroup.processes())
        try:
            found = await cuda_processes(helper, there, self._gpus.limits.settle)
            away = [process.pid for process in found if process.state is State.CHECKPOINTED]
            if away and all(process.state in (State.CHECKPOINTED, State.RUNNING) for process in found):
                left.pids = away
                self._gpus.record_more(())
                return False
            stuck = await sequence.bring_back(helper, [*there], self._gpus.limits)
        except CudaError as error:
            stuck = [str(error)]
        if stuck:
            self._gpus.suspended = left
            raise NotBack(f"the resume was cancelled; {'; '.join(stuck)}. `kybernate resume` retries")
        self._gpus.record_more((), back=left.pids)
        return True

    async def _return_anyway(self, helper: CudaHelper, left: Left, error: CudaError) -> None:
        """After a failure, bring each process back that can be. Raises NotBack if that is not all of them."""
        if stuck := await sequence.bring_back(helper, left.pids, self._gpus.limits):
            self._gpus.suspended = left
            raise NotBack(f"{error}; {'; '.join(stuck)}. `kybernate resume` retries") from error
        self._gpus.log.warning("gpu.reloaded_late", task=self._gpus.target.id, error=str(error))

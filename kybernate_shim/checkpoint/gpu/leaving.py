"""Processes of a container leave their GPUs: first a look at what would be lost, then the driver's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kybernate_shim.checkpoint.compat import FORCE
from kybernate_shim.checkpoint.gpu.container_gpus import ContainerGpus
from kybernate_shim.checkpoint.gpu.inherited import Inherited
from kybernate_shim.checkpoint.gpu.left import ArenaUse, Left
from kybernate_shim.checkpoint.gpu.usage import own_memory, usage_of
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack
from kybernate_shim.errors import Refused
from kybernate_shim.gpu import evidence, preflight, sequence
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import CudaInfo, CudaProcess, State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.processes import cuda_processes
from kybernate_shim.linux.cgroup.headroom import headroom
from kybernate_shim.oci.preload_spec import asks_for_arena, has_library


class Leaving:
    """Takes the processes of one container off their GPUs. `inherited` is what forked children hold of the devices."""

    def __init__(self, gpus: ContainerGpus) -> None:
        self._gpus = gpus
        self.inherited = Inherited(gpus.target, gpus.log)

    async def leave(
        self,
        helper: CudaHelper,
        operation: Operation,
        *,
        around: Callable[[int], sequence.Around],
        driven: Callable[[], Mapping[int, int]] = dict,
        force: bool,
        lock_seconds: float = 0,
        arena: bool = False,
    ) -> Left:
        """Take the processes off their GPUs; `around` gets the number of bytes to move, and encloses the move.

        `driven` returns afterwards what of them has not become their own memory, by pid.

        With `arena`, into the node's memory where that is possible.
        """
        target = self._gpus.target
        assert target.cgroup is not None
        try:
            with operation.step("preflight"):
                info = await helper.info()
                found = await cuda_processes(helper, target.cgroup.processes())
                subject = await self._refuse_if_lost(info, found, force=force)
                active = [process.pid for process in found if process.state is not State.CHECKPOINTED]
                memory = own_memory(active)
                imports = {process.pid: process.imports for process in subject.cuda}
            limits = replace(self._gpus.limits, lock=lock_seconds or self._gpus.limits.lock)
            with operation.showing("cuda-suspend"), self._told_late():
                done = await sequence.suspend(
                    helper,
                    target.cgroup.processes,
                    limits,
                    record=self._gpus.record_more,
                    last_look=partial(preflight.require_no_more_imports, imports),
                    while_locked=lambda pids: self.inherited.observe({*pids, *(one.pid for one in found)}),
                    around=around(subject.vram_bytes),
                    arena=arena,
                )
        except CudaError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError as error:
            self._require_undone(error)
            raise
        use = self._arena_use(done) if arena else ArenaUse()
        for reason in use.reasons:
            self._gpus.log.warning("arena.not_used", task=target.id, error=reason, bytes=use.bytes)
        moved = done.taken.moved
        grown = {
            pid: after - memory[pid] + moved.get(pid, 0) + driven().get(pid, 0)
            for pid, after in own_memory(done.pids).items()
            if pid in memory
        }
        waiting = [process.pid for process in found if process.state is State.CHECKPOINTED]
        before = (self._gpus.suspended or Left()).usage
        usage = usage_of(info, [*waiting, *done.pids], grown, self._gpus.usable(info), before)
        left = Left(usage, tuple(self._gpus.usable(info)), done.pids, arena_use=use)
        operation.add_steps(done.steps, "cuda-checkpoint", left.vram_bytes)
        return left

    def _arena_use(self, done: sequence.Suspended) -> ArenaUse:
        """Return what a container that has asked for the arena got of it, and why not more."""
        target = self._gpus.target
        if not asks_for_arena(target.spec, target.config):
            return ArenaUse()
        reasons = [f"process {pid}: {reason}" for pid, reason in done.taken.reasons.items()]
        if reasons and target.config.gpu.arena and not has_library(target.spec):
            reasons = ["the container was created while gpu.arena was not set, so without the library: create it again"]
        return ArenaUse(True, done.taken.bytes, tuple(reasons))

    async def arena_sizes(self, helper: CudaHelper) -> dict[int, int]:
        """Return the bytes that the arena has of each process that it has something of. Raises Refused."""
        assert self._gpus.target.cgroup is not None
        try:
            found = await cuda_processes(helper, self._gpus.target.cgroup.processes())
        except CudaError as error:
            raise Refused(f"{error}; container {self._gpus.target.id} continues as before") from error
        return {process.pid: process.arena_bytes for process in found if process.arena_bytes}

    async def _refuse_if_lost(self, info: CudaInfo, found: Sequence[CudaProcess], *, force: bool) -> preflight.Subject:
        """Return what is about to move into host memory, and whose. Raises Refused and TimeoutError."""
        cgroup = self._gpus.target.cgroup
        assert cgroup is not None
        cuda = [process.pid for process in found]
        pids = cgroup.processes()
        active = {process.pid for process in found if process.state is not State.CHECKPOINTED}
        seen = {one.pid: one for one in await evidence.seen(partial(evidence.look, pids))}
        used = [gpu for gpu in info.gpus if active & gpu.holdings.keys()]
        known = bool(used) or not active
        if not known:
            usable = self._gpus.usable(info)
            used = [gpu for gpu in info.gpus if gpu.uuid in usable]
        subject = preflight.Subject(
            node=info,
            cuda=[seen[pid] for pid in cuda if pid in seen],
            others=[one for pid, one in seen.items() if pid not in cuda],
            gpus=[gpu.uuid for gpu in used],
            vram_bytes=sum(
                sum(gpu.holdings.get(pid, 0) for pid in active) if known else gpu.used_bytes for gpu in used
            ),
            known=known,
            room=headroom(cgroup),
            denied_drivers=self._gpus.settings.denied_drivers,
        )
        annotated = self._gpus.target.config.pods_choice(self._gpus.target.spec.annotations, FORCE) == "true"
        for taken in preflight.require_survivable(preflight.judge(subject), force=force or annotated):
            self._gpus.log.warning("preflight.overridden", fact=taken.fact, evidence=taken.evidence)
        return subject

    @contextmanager
    def _told_late(self) -> Iterator[None]:
        """Translate a look at locked processes that took too long; the undo has run already."""
        try:
            yield
        except TimeoutError as error:
            raise self._failed(error) from error

    def _require_undone(self, cancelled: asyncio.CancelledError) -> None:
        """Raise NotBack if a cancel, whose undo has run already, has left processes off their GPUs."""
        if stuck := [note for note in getattr(cancelled, "__notes__", []) if note.startswith("not undone")]:
            raise NotBack(f"it was cancelled; {'; '.join(stuck)}. `kybernate resume` retries") from cancelled
        self._gpus.record_more(())

    def _failed(self, error: CudaError | TimeoutError) -> Exception:
        """Translate a failure whose undo has run already."""
        notes = getattr(error, "__notes__", [])
        if stuck := [note for note in notes if note.startswith("not undone")]:
            return NotBack(f"{error}; {'; '.join(stuck)}. `kybernate resume` retries")
        self._gpus.record_more(())
        return Refused("; ".join([str(error), *notes, f"container {self._gpus.target.id} keeps running"]))

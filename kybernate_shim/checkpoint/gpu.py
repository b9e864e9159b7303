"""A container's processes leave their GPUs, for a checkpoint or in place, and come back to these or to others.

The order of the driver's steps and their undo is `cuda.sequence`'s; here is what a container adds: who its processes
are, whether they would survive, what a manifest says of them, the word that its bundle keeps of locked processes, and
the GPUs that its new place has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kybernate_shim.checkpoint.arena_path import ArenaBack, ArenaOut
from kybernate_shim.checkpoint.compat import FORCE, Finding
from kybernate_shim.checkpoint.gpu_accounts import Accounts, draw_up, inner_pid, own_memory
from kybernate_shim.checkpoint.gpu_room import ahead, await_room, bytes_on, needs
from kybernate_shim.checkpoint.image import Image
from kybernate_shim.checkpoint.inherited import DevicesKept, Inherited, Release
from kybernate_shim.checkpoint.manifest import ArenaFile, DataPath, Gpu, GpuMemory, Manifest, Released, VramFile
from kybernate_shim.checkpoint.operation import Operation, Step
from kybernate_shim.checkpoint.target import NotBack, Target
from kybernate_shim.checkpoint.vram_path import BytesLost, WayBack, WayOut, hastened
from kybernate_shim.config import NO_NODE
from kybernate_shim.config import Gpu as Settings
from kybernate_shim.cuda import client, evidence, gpu_map, preflight, sequence
from kybernate_shim.cuda.claim import claimed
from kybernate_shim.cuda.client import CudaHelper, CudaInfo, CudaProcess, State, cuda_helper
from kybernate_shim.cuda.errors import CudaError
from kybernate_shim.cuda.gpu_map import GpuMismatch
from kybernate_shim.cuda.headroom import headroom
from kybernate_shim.cuda.processes import cuda_processes
from kybernate_shim.cuda.vram.digest import KIND, STRONG
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.errors import Refused
from kybernate_shim.linux.device_nodes import make_char_device
from kybernate_shim.logs import Log
from kybernate_shim.oci.preload_spec import asks_for_arena, has_library
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.trust.rights import Right, may

NVIDIA_MAJOR = 195
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
MOMENT = 2.0  # seconds for which the arena may have more of a GPU than the process needs that it brings back


class GpuStepFailed(Refused):
    """A step on the GPUs failed, and the container computes on as before."""


class NothingToSuspend(Refused):
    """No process of the container holds CUDA state."""


class NothingToResume(Refused):
    """No process of the container waits for its GPU."""


@dataclass(frozen=True)
class ArenaUse:
    """What a container got of the arena that it `asked` for, and for what `reasons` that is not all of its VRAM."""

    asked: bool = False
    bytes: int = 0
    reasons: tuple[str, ...] = ()


@dataclass
class Left:
    """What has left its GPUs. Set `gone` where the processes have ended, so that nobody is brought back."""

    accounts: Accounts = field(default_factory=Accounts)
    visible_gpus: tuple[str, ...] = ()
    pids: Sequence[int] = ()
    gone: bool = False
    arena_use: ArenaUse = ArenaUse()
    way: WayOut | None = None
    away: ArenaOut | None = None
    inheritance: Release | None = None

    @property
    def vram(self) -> tuple[VramFile, ...]:
        return self.way.files if self.way is not None else ()

    @property
    def data_path(self) -> DataPath:
        return self.way.data_path if self.way is not None else DataPath("plain")

    @property
    def driven_bytes(self) -> int:
        """What the driver has put into files of the image, and the processes have mapped until they are moved out."""
        return sum(self.way.driven.values()) if self.way is not None else 0

    @property
    def arena(self) -> tuple[ArenaFile, ...]:
        return self.away.files if self.away is not None else ()

    @property
    def arena_bytes(self) -> int:
        return self.away.bytes if self.away is not None else 0

    @asynccontextmanager
    async def moved_out(self, image: Path, operation: Operation) -> AsyncIterator[None]:
        """Keep the VRAM bytes in files of `image` while the context lasts. Raises as WayOut.moved_out."""
        assert self.way is not None
        assert self.away is not None
        async with self.way.moved_out(image, operation, lambda: self.gone), self.away.saving(image, operation):
            yield

    async def complete(self) -> None:
        """Return when all VRAM bytes are in the image, of which the arena's travel beside CRIU. Raises a VramError."""
        if self.away is not None:
            await self.away.complete()

    async def release(self, operation: Operation) -> None:
        """Have forked processes give up what they have inherited; they must run, not be frozen. Raises DevicesKept."""
        if self.inheritance is not None:
            try:
                await self.inheritance.run(operation)
            except CudaError as error:
                raise DevicesKept(f"{error}; the container goes on as before") from error

    async def must_release(self) -> bool:
        """Tell whether one of the processes, which are frozen, still holds something that CRIU cannot dump."""
        return self.inheritance is not None and await self.inheritance.needed()

    @property
    def released(self) -> tuple[Released, ...]:
        return tuple(self.inheritance.done.values()) if self.inheritance is not None else ()

    @property
    def cuda_processes(self) -> tuple[GpuMemory, ...]:
        return self.accounts.processes

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.accounts.gpus

    @property
    def vram_bytes(self) -> int:
        return self.accounts.vram_bytes


class CudaAccelerator:
    """The GPUs of one container. `note` is told the pids that may be locked, before they are and when none is."""

    def __init__(self, target: Target, note: Callable[[Sequence[int]], None], log: Log) -> None:
        self._target = target
        self._note = note
        self._log = log
        self.suspended: Left | None = None  # what `suspend` has taken out, until `resume`
        self._inherited = Inherited(target, log)
        self._lost = ""  # why processes that are off their GPUs must never come back to them
        self._back = WayBack(target.children, self._settings, log)
        self._expected: Sequence[client.Gpu] = ()  # where a restore will compute
        self._arena_back = ArenaBack(target.children, self._settings)

    @property
    def _settings(self) -> Settings:
        """The settings of this moment: those of the target follow the node's file between two operations."""
        return self._target.config.gpu

    @property
    def _limits(self) -> sequence.Limits:
        settings = self._settings
        return sequence.Limits(settings.lock, settings.checkpoint, settings.restore, settings.unlock)

    # -- Leaving ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def detached(
        self, operation: Operation, image: Path, *, force: bool, strong: bool = False
    ) -> AsyncIterator[Left]:
        """Keep the processes off their GPUs while the context lasts; they must run, not be frozen, at both ends.

        Some of their bytes may be in files of `image` then; `strong`: with digests that find forgery.

        Raises PreflightRefused and GpuStepFailed with the container as it was, and NotBack when it could not be brought
        back in the end. A container that was suspended before stays so.
        """
        digest = STRONG if strong else KIND
        way = WayOut(self._target.children, self._settings, self._log, digest)
        async with self._helper() as helper, aclosing(way):
            left = await self._leave(
                helper,
                operation,
                around=lambda size: partial(way.watching, image=image, size=size),
                driven=lambda: way.driven,
                force=force,
                arena=self._settings.data_path == "fast",
            )
            left.way = way
            left.inheritance = Release(self._inherited, helper)
            try:
                sizes = await self._arena_sizes(helper)
                left.away = ArenaOut(self._target.children, self._settings, sizes, digest)
                yield left
            except BytesLost as error:
                self._lost = f"{error}; the processes of container {self._target.id} cannot compute on: end it"
                raise NotBack(self._lost) from error
            except BaseException as error:
                await sequence.undisturbed(self._undo(helper, left, error))
                raise
            if left.gone:
                self._note(())
            elif left.pids:  # who was suspended before needs no room on a GPU now
                # Not to be cut short by a deadline: the image is complete, and the container must not stay locked.
                await sequence.undisturbed(self._return(helper, left, operation, self._limits))

    async def suspend(self, operation: Operation, *, force: bool, lock_seconds: float = 0) -> Left:
        """Take all processes off their GPUs until `resume`; nothing to do for those that are off already.

        Raises NothingToSuspend, PreflightRefused and GpuStepFailed, with the container as it was.
        """
        async with self._helper() as helper:
            left = await self._leave(
                helper,
                operation,
                around=lambda size: partial(self._hastened, size=size),
                force=force,
                lock_seconds=lock_seconds,
                arena=True,
            )
        if not left.pids and self.suspended is None:
            raise NothingToSuspend(f"no process of container {self._target.id} holds CUDA state")
        if left.pids:
            self.suspended = _joined(self.suspended, left)
        return left

    async def resume(self, operation: Operation, *, restore_seconds: float = 0, room_seconds: float = 0) -> Left:
        """Bring every process back that waits for its GPU, whoever took it off.

        For `room_seconds` it waits until the GPUs have the room, with all done before that needs less of it: another
        container may be leaving just now.

        Where the driver's restore takes longer than `restore_seconds`, if that is given, and than the configured limit
        in a second attempt, the container stays suspended.
        Raises NothingToResume, GpuMismatch where the GPUs have not enough room, and NotBack.
        """
        if self._lost:
            raise NotBack(self._lost)
        async with self._helper() as helper:
            waiting = await self._in_state(helper, State.CHECKPOINTED, State.LOCKED)
            if not waiting:
                self.suspended = None  # another client has brought them back, or they have ended
                raise NothingToResume(f"no process of container {self._target.id} waits for its GPU")
            left = self.suspended or Left(pids=[process.pid for process in waiting])
            left.pids = [process.pid for process in waiting]
            limits = replace(self._limits, restore=restore_seconds or self._limits.restore)
            await sequence.undisturbed(self._return(helper, left, operation, limits, room_seconds))
        self.suspended = None
        return left

    @asynccontextmanager
    async def _hastened(self, pids: Sequence[int], taken: int, *, size: int) -> AsyncIterator[None]:
        async with hastened(self._target.children, self._settings, self._log, pids, size - taken):
            yield

    async def _leave(
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
        """Take the processes off their GPUs; `around` is told how many bytes that moves, and encloses it.

        `driven` tells afterwards what of them has not become memory of their own, by pid.

        With `arena`, into the node's memory where that is possible.
        """
        target = self._target
        assert target.cgroup is not None
        try:
            with operation.step("preflight"):
                info = await helper.info()
                found = await cuda_processes(helper, target.cgroup.processes())
                subject = self._refuse_if_lost(info, found, force=force)
                active = [process.pid for process in found if process.state is not State.CHECKPOINTED]
                memory = own_memory(active)
                imports = {process.pid: process.imports for process in subject.cuda}
            limits = replace(self._limits, lock=lock_seconds or self._limits.lock)
            with _telling(operation, "cuda-suspend"):
                done = await sequence.suspend(
                    helper,
                    target.cgroup.processes,
                    limits,
                    note=self._note_more,
                    last_look=partial(preflight.require_no_more_imports, imports),
                    while_locked=lambda pids: self._inherited.observe({*pids, *(one.pid for one in found)}),
                    around=around(subject.vram_bytes),
                    arena=arena,
                )
        except CudaError as error:
            raise self._failed(error) from error
        use = self._arena_use(done) if arena else ArenaUse()
        for reason in use.reasons:
            self._log.warning("arena.not_used", task=target.id, error=reason, bytes=use.bytes)
        moved = done.taken.moved
        grown = {
            pid: after - memory[pid] + moved.get(pid, 0) + driven().get(pid, 0)
            for pid, after in own_memory(done.pids).items()
            if pid in memory
        }
        waiting = [process.pid for process in found if process.state is State.CHECKPOINTED]
        before = (self.suspended or Left()).accounts
        accounts = draw_up(info, [*waiting, *done.pids], grown, self._usable(info), before)
        left = Left(accounts, tuple(self._usable(info)), done.pids, arena_use=use)
        _add_steps(operation, done.steps, "cuda-checkpoint", left.vram_bytes)
        return left

    def _arena_use(self, done: sequence.Suspended) -> ArenaUse:
        """Return what a container that has asked for the arena got of it, and why not more."""
        target = self._target
        if not asks_for_arena(target.spec, target.config):
            return ArenaUse()
        reasons = [f"process {pid}: {reason}" for pid, reason in done.taken.reasons.items()]
        if reasons and target.config.gpu.arena and not has_library(target.spec):
            reasons = ["the container was created while gpu.arena was not set, so without the library: create it again"]
        return ArenaUse(True, done.taken.bytes, tuple(reasons))

    async def _arena_sizes(self, helper: CudaHelper) -> dict[int, int]:
        """Return the bytes that the arena has of each process that it has something of. Raises GpuStepFailed."""
        assert self._target.cgroup is not None
        try:
            found = await cuda_processes(helper, self._target.cgroup.processes())
        except CudaError as error:
            raise GpuStepFailed(f"{error}; container {self._target.id} goes on as before") from error
        return {process.pid: process.arena_bytes for process in found if process.arena_bytes}

    def _refuse_if_lost(self, info: CudaInfo, found: Sequence[CudaProcess], *, force: bool) -> preflight.Subject:
        """Return what is about to move into host memory, and whose. Raises PreflightRefused."""
        cgroup = self._target.cgroup
        assert cgroup is not None
        cuda = [process.pid for process in found]
        pids = cgroup.processes()
        active = {process.pid for process in found if process.state is not State.CHECKPOINTED}
        seen = {one.pid: one for one in evidence.look(pids)}
        used = [gpu for gpu in info.gpus if active & gpu.holdings.keys()]
        told = bool(used) or not active
        if not told:
            usable = self._usable(info)
            used = [gpu for gpu in info.gpus if gpu.uuid in usable]
        subject = preflight.Subject(
            node=info,
            cuda=[seen[pid] for pid in cuda if pid in seen],
            others=[one for pid, one in seen.items() if pid not in cuda],
            gpus=[gpu.uuid for gpu in used],
            vram_bytes=sum(sum(gpu.holdings.get(pid, 0) for pid in active) if told else gpu.used_bytes for gpu in used),
            told=told,
            room=headroom(cgroup),
            denied_drivers=self._settings.denied_drivers,
        )
        annotated = self._target.config.pods_choice(self._target.spec.annotations, FORCE) == "true"
        for taken in preflight.require_survivable(preflight.judge(subject), force=force or annotated):
            self._log.warning("preflight.overridden", fact=taken.fact, evidence=taken.evidence)
        return subject

    def _failed(self, error: CudaError) -> Exception:
        """Translate a failure whose undo has run already."""
        notes = getattr(error, "__notes__", [])
        if stuck := [note for note in notes if note.startswith("not undone")]:
            return NotBack(f"{error}; {'; '.join(stuck)}. `kybernate resume` tries again")
        self._note_more(())
        return GpuStepFailed("; ".join([str(error), *notes, f"container {self._target.id} computes on"]))

    def _note_more(self, pids: Sequence[int], *, back: Sequence[int] = ()) -> None:
        """Leave word of `pids` and of those that stay suspended, without those that are back."""
        stay = self.suspended.pids if self.suspended is not None else ()
        self._note([*(pid for pid in stay if pid not in back), *pids])

    # -- Coming back --------------------------------------------------------------------------------------------------

    async def _undo(self, helper: CudaHelper, left: Left, cause: BaseException) -> None:
        stuck = await sequence.bring_back(helper, left.pids, self._limits)
        if not stuck:
            self._note_more((), back=left.pids)
            return
        raise NotBack(f"{cause}; and the container is not back on its GPU: {'; '.join(stuck)}") from cause

    async def _return(
        self, helper: CudaHelper, left: Left, operation: Operation, limits: sequence.Limits, room_seconds: float = 0
    ) -> None:
        """Bring back what is checkpointed, and unlock what is only locked."""
        steps: list[sequence.Step] = []
        try:
            async with claimed([gpu.uuid for gpu in left.gpus]):
                waiting = await self._in_state(helper, State.CHECKPOINTED, State.LOCKED, among=left.pids)
                locked = [process.pid for process in waiting if process.state is State.LOCKED]
                await helper.unlock(locked, limits.unlock)
                pids = [process.pid for process in waiting if process.state is State.CHECKPOINTED]
                at_first, later = needs(left.gpus, waiting, split=room_seconds > 0)
                node = await await_room(helper, at_first, room_seconds)
                plan = gpu_map.Plan((), {gpu.uuid: bytes_on(gpu) for gpu in left.gpus})
                names = {name: pid for pid in pids if (name := inner_pid(pid)) is not None}
                with _telling(operation, "cuda-resume"):
                    room = partial(await_room, helper, later, room_seconds) if later else None
                    early = ahead(left.gpus, names, plan, node)
                    steps = await sequence.resume(helper, pids, limits=limits, room=room, ahead=early)
        except GpuMismatch as error:
            self.suspended = left
            raise NotBack(
                f"{error}; until then the container stays suspended, `kybernate resume` tries again"
            ) from error
        except CudaError as error:
            await self._return_anyway(helper, left, error)
        self._note_more((), back=left.pids)
        _add_steps(operation, steps, "cuda-restore", left.vram_bytes)

    async def _return_anyway(self, helper: CudaHelper, left: Left, error: CudaError) -> None:
        """After a failure, bring each process back that can be. Raises NotBack if that is not all of them."""
        if stuck := await sequence.bring_back(helper, left.pids, self._limits):
            self.suspended = left
            raise NotBack(f"{error}; {'; '.join(stuck)}. `kybernate resume` tries again") from error
        self._log.warning("gpu.returned_late", task=self._target.id, error=str(error))

    async def _in_state(
        self, helper: CudaHelper, *states: State, among: Iterable[int] | None = None
    ) -> list[CudaProcess]:
        assert self._target.cgroup is not None
        pids = self._target.cgroup.processes()
        wanted = pids if among is None else [pid for pid in among if pid in pids]
        return [process for process in await cuda_processes(helper, wanted) if process.state in states]

    # -- After a restore ----------------------------------------------------------------------------------------------

    async def compare(self, manifest: Manifest) -> list[Finding]:
        """Return what speaks against bringing the image's processes to the GPUs that are here."""
        try:
            async with self._helper() as helper:
                info = await helper.info()
                plan = self._plan(manifest, info)
                await await_room(helper, plan.bytes, MOMENT)
        except (CudaError, GpuMismatch) as error:
            return [Finding("GPU", "", str(error), "refusal")]
        self._expected = [gpu for gpu in info.gpus if gpu.uuid in plan.bytes]
        # The arena's gate is a lock that others may hold.
        return [*_driver_findings(manifest, info), *await asyncio.to_thread(self._arena_back.compare, manifest)]

    @asynccontextmanager
    async def expecting(self, image: Image) -> AsyncIterator[None]:
        """Enclose the whole of a restore after `compare`, and read VRAM bytes ahead meanwhile."""
        nodes = {gpu.node for gpu in self._expected}
        near = nodes.pop() if len(nodes) == 1 else NO_NODE
        async with self._back.expecting(image), self._arena_back.expecting(image, near, self._get_ready):
            yield

    async def _get_ready(self, pid: int) -> None:
        """Have the arena ready for what process `pid` reads; what is wrong with it shows when it is needed."""
        with suppress(CudaError):
            async with self._helper() as helper:
                await helper.expect(pid, [gpu.uuid for gpu in self._expected], self._limits.restore)

    async def attach(self, image: Image, operation: Operation) -> None:
        """Bring restored processes onto the GPUs of their new container. Raises NotBack with them still off."""
        assert self._target.cgroup is not None
        manifest = image.manifest
        wanted = {process.pid for process in manifest.cuda_processes}
        try:
            async with self._helper() as helper:
                info = await helper.info()
                plan = self._plan(manifest, info)
                waiting = await self._in_state(helper, State.CHECKPOINTED)
                names = {inner_pid(process.pid): process.pid for process in waiting}
                if missing := wanted - names.keys():
                    raise NotBack(
                        f"{len(wanted)} processes of the image held CUDA state, and the driver does not know of"
                        f" {', '.join(map(str, sorted(missing)))} (pids in the container) that they wait for a GPU"
                    )
                pids = [process.pid for process in waiting]
                self._note(pids)
                self._make_device_nodes()
                inner = {name: pid for name, pid in names.items() if name is not None}
                await self._back.fill(image, inner, operation)
                await self._arena_back.hand_over(image, inner, operation)
                async with claimed(plan.bytes):
                    node = (await helper.info()).gpus
                    gpu_map.require_room(plan, node)
                    with _telling(operation, "cuda-resume"):
                        proof = partial(self._back.prove, image) if manifest.vram else None
                        early = ahead(manifest.gpus, inner, plan, node)
                        steps = await sequence.resume(helper, pids, plan.pairs, self._limits, proof=proof, ahead=early)
        except (CudaError, GpuMismatch, VramError) as error:
            raise NotBack("; ".join([str(error), *getattr(error, "__notes__", [])])) from error
        self._note(())
        _add_steps(operation, steps, "cuda-restore", sum(process.bytes for process in manifest.cuda_processes))

    def _plan(self, manifest: Manifest, info: CudaInfo) -> gpu_map.Plan:
        spec, config = self._target.spec, self._target.config
        believed = may(requester_of(spec), Right.VISIBLE_DEVICES, config)
        usable = self._usable(info, devices_only=not believed)
        try:
            return gpu_map.make_plan(
                [gpu_map.Used(gpu.uuid, gpu.model, bytes_on(gpu)) for gpu in manifest.gpus],
                manifest.visible_gpus,
                [gpu for gpu in info.gpus if gpu.uuid in usable],
                gpu_map.parse_map(config.pods_choice(spec.annotations, gpu_map.ANNOTATION)),
            )
        except GpuMismatch as error:
            if believed:
                raise
            raise GpuMismatch(
                f"{error}. Of a pod, the devices in its container's configuration count, as CDI puts them there;"
                f" {VISIBLE} does only with `gpu.visible_devices_env = true` on this node"
            ) from error

    def _usable(self, info: CudaInfo, *, devices_only: bool = False) -> list[str]:
        spec = self._target.spec
        numbers = gpu_map.device_numbers(spec.devices)
        return gpu_map.usable_gpus(numbers, spec.env(VISIBLE), info.gpus, devices_only=devices_only)

    def _make_device_nodes(self) -> None:
        """Add the GPUs of the new container to its /dev: CRIU restores the old one's, and the driver opens by name."""
        for device in self._target.spec.linux.get("devices") or ():
            if not gpu_map.device_numbers([str(device.get("path"))]) or device.get("type") != "c":
                continue
            number = os.makedev(device["major"], device["minor"])
            try:
                make_char_device(self._target.init_pid, device["path"], number)
            except OSError as error:
                raise NotBack(f"{device['path']} cannot be made in the container: {error.strerror}") from error

    @asynccontextmanager
    async def _helper(self) -> AsyncIterator[CudaHelper]:
        async with cuda_helper(client.SOCKET) as helper:
            yield helper


def _joined(first: Left | None, second: Left) -> Left:
    if first is None:
        return second
    pids, one, two = [*first.pids, *second.pids], first.arena_use, second.arena_use
    use = ArenaUse(one.asked or two.asked, one.bytes + two.bytes, (*one.reasons, *two.reasons))
    return Left(second.accounts, second.visible_gpus, pids, arena_use=use)


def _driver_findings(manifest: Manifest, info: CudaInfo) -> Iterable[Finding]:
    for wanted in sorted({gpu.driver for gpu in manifest.gpus} - {"", info.driver_version}):
        same_branch = wanted.partition(".")[0] == info.driver_version.partition(".")[0]
        yield Finding("GPU driver", wanted, info.driver_version or "unknown", "risk" if same_branch else "refusal")


def _add_steps(operation: Operation, steps: Iterable[sequence.Step], moving: str, moved: int) -> None:
    steps = list(steps)
    moved -= sum(step.bytes for step in steps)  # the arena's share is told by its own step
    operation.steps += [
        Step(step.name, step.seconds, step.bytes or (max(0, moved) if step.name == moving else 0), step.spared)
        for step in steps
    ]


@contextmanager
def _telling(operation: Operation, name: str):  # type: ignore[no-untyped-def]  # a generator of nothing
    """Let whoever asks for the operation's progress see this step; its times are added when they are known."""
    operation.step_name = name
    try:
        yield
    finally:
        operation.step_name = ""

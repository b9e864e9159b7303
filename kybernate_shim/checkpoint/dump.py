"""A running container becomes a checkpoint image.

Each step's reversal goes onto one stack, and the stack is unwound in every case: after a failure, so that the container
keeps running as before, and after a success that leaves it running, for the same reason. The container is frozen no
longer than its state is being read: flushing the image to the disk often takes longer than that, and where the disk
would make CRIU wait, its files are in memory until the container runs again. Only when it is to be gone afterwards does
it stay frozen until the image is complete, and is then killed: CRIU could kill it itself, but then a full disk in the
last step would lose the container.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint import script
from kybernate_shim.checkpoint.criu.config import explain, refuse_cuda_plugin
from kybernate_shim.checkpoint.dump_manifest import LOG, STATISTICS, add_own_files, finish
from kybernate_shim.checkpoint.dump_plan import (
    DumpPlan,
    memory_bytes,
    plan_dump,
    require_common_state,
    require_directories,
)
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.freeze import freeze_container
from kybernate_shim.checkpoint.freeze_limit import FreezeLimit, Standstill
from kybernate_shim.checkpoint.hold import FrozenHold
from kybernate_shim.checkpoint.image import staging
from kybernate_shim.checkpoint.image.copies import in_use
from kybernate_shim.checkpoint.image.digests import DEFAULT as DEFAULT_DIGEST
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import ImageVolume
from kybernate_shim.checkpoint.image.plaintext import encrypted, require_room, staged_for_dump
from kybernate_shim.checkpoint.memory_first import expected, in_memory_first, read_what_is_copied, write_out
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.restorable import make_restorable
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.rootfs.diff import write_diff
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.checkpoint.target import Accelerator, Detached, NotBack, Target
from kybernate_shim.checkpoint.volumes.save import save
from kybernate_shim.checkpoint.work import working_in
from kybernate_shim.errors import Failed
from kybernate_shim.linux import thread_settings
from kybernate_shim.linux.cgroup.cgroup import FreezeTimedOut
from kybernate_shim.linux.thread_settings import ThreadSettings
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end
from kybernate_shim.logs import Log
from kybernate_shim.oci.commands import Criu
from kybernate_shim.oci.runtime import RuntimeFailed
from kybernate_shim.undo import AsyncUndo
from kybernate_shim.vram_io.errors import VramError

if TYPE_CHECKING:
    pass  # few nodes encrypt

ADVICE = (
    # Its pull request 2719: SO_PASSCRED, which Linux 6.16 took away from all but a few families of sockets.
    ("Can't get 1:16 opt", "CRIU before 4.2 cannot dump network sockets on Linux 6.16 and later: install a newer one"),
)


@dataclass
class _Course:
    """What has come of a dump. `gone`: CRIU has ended the container; `lost`: what failed although there is an image."""

    gone: bool = False
    lost: Failed | None = None


async def dump(
    target: Target,
    request: DumpRequest,
    operation: Operation,
    log: Log,
    accelerator: Accelerator | None = None,
    hold: FrozenHold | None = None,
) -> Dumped:
    """Write the checkpoint image of `target` and leave it as it was, frozen if it came frozen.

    With `hold`, it stays frozen and off its GPUs until that is over, and this returns when it runs on or has ended.

    Raises Failed, Refused, TierFull, CheckpointInvalid, TimeoutError or what the accelerator refuses; there is
    no image then, and the container continues. Raises NotBack where its GPU state could not be brought back, and
    Failed where CRIU has ended it too early; an image whose data was complete by then is finished and kept, since
    it is the best copy of the container.
    """
    course = _Course()
    try:
        with (
            staging.staged(request.image, lambda: course.gone),
            working_in(request.work, without=(LOG, STATISTICS)),
        ):
            async with staged_for_dump(target, request) as staged, operation.within(request.deadline):
                dumped = await _steps(target, staged, operation, log, accelerator, hold, course)
    except RuntimeFailed as error:
        raise Failed(_advised(explain(f"{_failed(target)}: {error.message}", request.work / LOG))) from error
    except TimeoutError as error:
        why = str(error) or f"it did not end within {request.deadline:g} s"  # the deadline itself comes without words
        raise TimeoutError(f"{_failed(target)}: {why}") from error
    except (OSError, VramError, FreezeTimedOut) as error:
        raise Failed(f"{_failed(target)}: {error}") from error
    if course.lost is not None:
        raise course.lost
    return dumped


def _failed(target: Target) -> str:
    """Say what failed, and what became of the container."""
    alive = target.cgroup is not None and target.cgroup.processes()
    return f"checkpoint of container {target.id} failed, it {'continues as before' if alive else 'has ended'}"


def _advised(message: str) -> str:
    """Add what to do about failures whose words in CRIU's log do not say it."""
    return "; ".join([message, *(advice for sign, advice in ADVICE if sign in message)])


async def _steps(
    target: Target,
    request: DumpRequest,
    operation: Operation,
    log: Log,
    accelerator: Accelerator | None,
    hold: FrozenHold | None,
    course: _Course,
) -> Dumped:
    assert target.cgroup is not None
    cgroup = target.cgroup
    was_frozen = cgroup.frozen
    with operation.step("look"):
        plan = await plan_dump(target, request, log)
        if accelerator is not None:
            refuse_cuda_plugin(plan.configuration)
    copied = await read_what_is_copied(target, request, plan, operation)
    killed, ends = False, request.exit
    still = Standstill(target.id, operation)

    async def set_frozen(frozen: bool) -> None:
        if not killed:  # freezing again what is about to die would wait for it, or keep it from dying
            await _set_frozen(target, frozen)
            if not frozen:
                still.end()

    async with AsyncExitStack() as memory, still, AsyncUndo() as back:
        back.push_async_callback(set_frozen, was_frozen)
        detached: Detached | None = None
        if accelerator is not None:
            if was_frozen:
                await to_the_end(cgroup.thaw)
            detached = await _leave_gpus(back, accelerator, target, request, operation)
            back.push_async_callback(set_frozen, False)
        needed = memory_bytes(target) + copied
        if not was_frozen:
            memory_first = in_memory_first(target, request, needed, limited=plan.limit.is_set)
            request = await memory.enter_async_context(memory_first)
            await _limit_freeze(target, request, operation, still, plan.limit, needed)
        await _stand_still(target, operation, detached, still)
        await require_directories(target, request)
        await require_common_state(target, request)
        threads = await as_long_as_wanted(partial(chosen_settings, target))
        with Digester(request.digest) as digester:
            volumes = await _write_state(target, request, operation, plan, digester, detached, still, course)
            if not request.exit and hold is None:
                await _bring_back(back, course)
                still.end()
            await to_the_end(partial(add_own_files, target, request))
            sealed = await encrypted(request, plan.manifest.id, target.config, operation)
            await write_out(request, operation)
            with operation.step("manifest"):
                work = partial(
                    finish, request, operation, plan, volumes, threads, detached, digester, sealed, still.milliseconds
                )
                dumped = await to_the_end(work, digester.stop)
        if hold is not None:
            operation.commit()
            still.stop_clock()
            operation.frozen_ms = still.milliseconds
            with in_use(request.destination or request.image):  # it may have the only copy of VRAM bytes
                ends = await hold.until_over(dumped) == "ended"
                if not ends:
                    await _bring_back(back, course)
        if ends:
            operation.commit()
            still.end()
            if not _criu_kills(request):
                await to_the_end(cgroup.kill)  # while it is frozen: nothing may happen after the image
            killed = True
            if detached is not None:
                detached.gone = True
        return dumped


async def _bring_back(back: AsyncUndo, course: _Course) -> None:
    """Let the container run on, also where its GPU state is lost: its image is complete."""
    try:
        await back.aclose()
    except NotBack as error:
        course.lost = error


async def _limit_freeze(
    target: Target, request: DumpRequest, operation: Operation, still: Standstill, limit: FreezeLimit, needed: int
) -> None:
    """Have the dump of about `needed` bytes keep to a limit. Raises Refused where it cannot."""
    if not limit.is_set:
        return
    with operation.step("estimate"):
        outlook = await to_the_end(partial(expected, request, needed))
    outlook.require(target.id, limit)
    still.allow(limit, outlook.remedy)


async def _leave_gpus(
    back: AsyncUndo, accelerator: Accelerator, target: Target, request: DumpRequest, operation: Operation
) -> Detached:
    """Take the processes off their GPUs until `back` is unwound, and their VRAM bytes out of them."""
    strong = request.digest != DEFAULT_DIGEST
    leaving = accelerator.detached(operation, request.image, force=request.force, strong=strong)
    detached = await back.enter_async_context(leaving)
    # Their memory has grown by what was in VRAM, but for what is in the image already.
    require_room(request, memory_bytes(target) - detached.driven_bytes + detached.arena_bytes)
    await back.enter_async_context(detached.moved_out(request.image, operation))
    return detached


async def _write_state(
    target: Target,
    request: DumpRequest,
    operation: Operation,
    plan: DumpPlan,
    digester: Digester,
    detached: Detached | None,
    still: Standstill,
    course: _Course,
) -> tuple[ImageVolume, ...]:
    """Write what has to be read while the container is frozen, and show that it can be restored.

    Return which volumes of its pod the image has.
    """
    complete = partial(_complete_state, target, request, operation, plan, detached)
    criu = partial(_run_criu, target, request, operation, plan, digester)
    if not _criu_kills(request):
        # Else its connections would stay in repair mode, and blocked by CRIU's rules.
        await (operation.unhurried(criu()) if request.tcp == "established" else criu())
        return await complete()
    operation.stoppable = "by a kill"  # from when on the container is gone, CRIU alone knows
    operation.stop_clock()
    still.stop_clock()
    answering = _Answering(complete, still)
    script.arm(plan.configuration)
    await operation.unhurried(answering.run(criu))
    operation.commit()  # the container is gone: its image must not be lost, too
    course.gone = True
    if answering.volumes is not None:
        return answering.volumes
    try:
        return await complete()  # of a CRIU that executes no script
    except Exception as error:  # noqa: BLE001  # whatever it is, what CRIU has written is all that there is
        course.lost = Failed(
            f"CRIU has ended container {target.id} without waiting for its image, which could not be completed:"
            f" {error}. It stays at {request.destination or request.image}, without the proof that it can be restored:"
            " keep it until a restore of it has succeeded"
        )
        return ()


async def _complete_state(
    target: Target, request: DumpRequest, operation: Operation, plan: DumpPlan, detached: Detached | None
) -> tuple[ImageVolume, ...]:
    """Add what CRIU does not dump to what it has dumped, and make the proof. Raises Refused."""
    if request.rootfs_diff:
        with operation.step("rootfs") as step:
            stop = threading.Event()
            step.bytes = await as_long_as_wanted(
                partial(_write_rootfs_diff, target, request.image, stop.is_set), stop.set
            )
    volumes: tuple[ImageVolume, ...] = ()
    if plan.volumes.volumes:
        with operation.step("volumes") as step:
            stop = threading.Event()
            work = partial(save, plan.volumes, request.image, stopped=stop.is_set)
            volumes = await as_long_as_wanted(work, stop.set)
            step.bytes = sum(volume.bytes for volume in volumes)
    with operation.step("proof"):
        await as_long_as_wanted(partial(make_restorable, target, request, [volume.name for volume in volumes]))
    if detached is not None:
        await detached.complete()
    return volumes


@dataclass
class _Answering:
    """Completes an image while a CRIU that kills waits for that. `volumes` are those of the image, once it is."""

    complete: Callable[[], Awaitable[tuple[ImageVolume, ...]]]
    still: Standstill
    volumes: tuple[ImageVolume, ...] | None = None
    failure: Exception | None = None

    async def run(self, criu: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        """Run CRIU. Raises what kept the image from being complete; the container continues then."""
        try:
            async with script.asked(self.answer) as environment:
                await criu(environment)
        except RuntimeFailed:
            if self.failure is not None:
                raise self.failure from None
            raise

    async def answer(self, question: str) -> bytes:
        """Return the answer to the script."""
        try:
            volumes = await self.complete()
            self.still.require()
            self.volumes = volumes
        except Exception as error:  # noqa: BLE001  # raised again by `run`, when CRIU has released the processes
            self.failure = error
            return script.REFUSE
        return script.PASS


async def _stand_still(target: Target, operation: Operation, detached: Detached | None, still: Standstill) -> None:
    """Freeze a container that CRIU can dump.

    Forked processes that appear before everything is frozen may have inherited what CRIU refuses.
    """
    assert target.cgroup is not None
    while True:
        if detached is not None:
            await detached.release(operation)
        still.begin()
        with operation.step("freeze"):
            await to_the_end(partial(freeze_container, target.cgroup))
        if detached is None or not await detached.must_release():
            return
        await to_the_end(target.cgroup.thaw)


def chosen_settings(target: Target) -> tuple[ThreadSettings, ...]:
    """Return what the threads of a frozen container have chosen and CRIU does not keep."""
    assert target.cgroup is not None
    return thread_settings.chosen(target.cgroup.processes(), target.init_pid)


async def _run_criu(
    target: Target,
    request: DumpRequest,
    operation: Operation,
    plan: DumpPlan,
    digester: Digester,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    words = Criu(
        request.image,
        request.work,
        tcp_established=request.tcp == "established",
        ext_unix_sk=request.options.external_unix_sockets,
        shell_job=request.options.terminal or target.spec.terminal,
        file_locks=True,
        extra=_mode(request.options.cgroups_mode),
    )
    runtime = replace(target.runtime, env={**target.runtime.env, **plan.configuration.environment, **environment})
    with operation.step("dump", total_bytes=memory_bytes(target)) as step, _progress(operation, request.image):
        with digester.following(request.image):
            await runtime.checkpoint(
                target.id, words, leave_running=not _criu_kills(request), empty_ns=request.options.empty_namespaces
            )
        step.bytes = _size_of(request.image)


def _criu_kills(request: DumpRequest) -> bool:
    """Return whether CRIU itself must end the container.

    Connections that are to continue elsewhere must vanish without a word to their peers; only CRIU can end them so.
    """
    return request.exit and request.tcp == "established"


def _write_rootfs_diff(target: Target, image: Path, stopped: Callable[[], bool]) -> int:
    overlay = find_overlay(target.bundle.rootfs)
    hidden = [str(mount.get("destination") or "") for mount in target.spec.mounts]
    return write_diff(overlay, image / ROOTFS_DIFF, exclude=hidden, stopped=stopped).bytes


async def _set_frozen(target: Target, frozen: bool) -> None:
    """Freeze or thaw, unless the container has ended meanwhile."""
    if target.cgroup is None or not target.cgroup.exists:
        return
    try:
        await to_the_end(target.cgroup.freeze if frozen else target.cgroup.thaw)
    except FileNotFoundError:
        pass  # it ended between the look and the order


@contextmanager
def _progress(operation: Operation, image: Path):  # type: ignore[no-untyped-def]  # a generator of nothing
    """Let the operation report how much is written; it is looked up only on request."""
    operation.measure = partial(_size_of, image)
    try:
        yield
    finally:
        operation.measure = None


def _size_of(directory: Path) -> int:
    """Return what CRIU has written, VRAM's files aside."""
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name.endswith(".img"))
    except FileNotFoundError:
        return 0


def _mode(cgroups_mode: str) -> tuple[str, ...]:
    return (f"--manage-cgroups-mode={cgroups_mode}",) if cgroups_mode else ()

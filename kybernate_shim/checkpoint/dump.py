"""A running container becomes a checkpoint image.

Each step's reversal goes onto one stack, and the stack is unwound in every case: after a failure, so that the container
keeps running as before, and after a success that leaves it running, for the same reason. The container is frozen no
longer than its state is being read: flushing the image to the disk often takes longer than that, and where the disk
would make CRIU wait, its files are in memory until the container runs again. Only when it is to be gone afterwards does
it stay frozen until the image is complete, and is then killed: CRIU could kill it itself, but then a full disk in the
last step would lose the container.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from kybernate_shim.checkpoint.criu.config import explain, refuse_cuda_plugin
from kybernate_shim.checkpoint.dump_manifest import LOG, STATISTICS, Chosen
from kybernate_shim.checkpoint.dump_plan import (
    memory_bytes,
    plan_dump,
    require_common_state,
    require_directories,
)
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.freeze import freeze_container
from kybernate_shim.checkpoint.freeze_limit import FreezeLimit, Standstill
from kybernate_shim.checkpoint.frozen_state import Course, FrozenState, criu_kills, write_before_the_kill, write_state
from kybernate_shim.checkpoint.hold import FrozenHold
from kybernate_shim.checkpoint.image import staging
from kybernate_shim.checkpoint.image.copies import in_use
from kybernate_shim.checkpoint.image.digests import DEFAULT as DEFAULT_DIGEST
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.plaintext import require_room, staged_for_dump
from kybernate_shim.checkpoint.memory_first import expected, in_memory_first, read_what_is_copied
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.sockets import open_inodes
from kybernate_shim.checkpoint.target import Accelerator, Detached, NotBack, Target
from kybernate_shim.checkpoint.work import working_in
from kybernate_shim.errors import Failed, Refused
from kybernate_shim.linux import socket_settings, thread_settings
from kybernate_shim.linux.cgroup.cgroup import FreezeTimedOut
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end
from kybernate_shim.logs import Log
from kybernate_shim.oci.runtime import RuntimeFailed
from kybernate_shim.undo import AsyncUndo
from kybernate_shim.vram_io.errors import VramError

ADVICE = (
    # Its pull request 2719: SO_PASSCRED, which Linux 6.16 took away from all but a few families of sockets.
    ("Can't get 1:16 opt", "CRIU before 4.2 cannot dump network sockets on Linux 6.16 and later: install a newer one"),
    # crun loads CRIU's library when it is asked for a checkpoint; some builds have no such command.
    ("libcriu", "crun needs CRIU's library for a checkpoint: install it (libcriu2 in Debian), or use runc"),
    ("unknown command checkpoint", "this crun was built without checkpoints: install another one, or use runc"),
)


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

    Raises Failed, Refused, NoRoom, CheckpointInvalid, TimeoutError or what the accelerator refuses; there is
    no image then, and the container continues. Raises NotBack where its GPU state could not be brought back, and
    Failed where CRIU has ended it too early; an image whose data was complete by then is finished and kept, since
    it is the best copy of the container.
    """
    course = Course()
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
    course: Course,
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
        chosen = await as_long_as_wanted(partial(chosen_settings, target, request))
        with Digester(request.digest) as digester:
            state = FrozenState(target, request, operation, plan, chosen, digester, detached, still)
            if criu_kills(request):
                dumped = await write_before_the_kill(state, course)
            else:
                volumes = await write_state(state)
                if not request.exit and hold is None:
                    await _bring_back(back, course)
                    still.end()
                dumped = await state.finish(volumes)
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
            if not criu_kills(request):
                await to_the_end(cgroup.kill)  # while it is frozen: nothing may happen after the image
            killed = True
            if detached is not None:
                detached.gone = True
        return dumped


async def _bring_back(back: AsyncUndo, course: Course) -> None:
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


def chosen_settings(target: Target, request: DumpRequest) -> Chosen:
    """Return what the programs of a frozen container have chosen and CRIU does not keep."""
    assert target.cgroup is not None
    pids = target.cgroup.processes()
    holders = open_inodes(pids).values()
    try:
        sockets = socket_settings.chosen(holders, target.init_pid, connections=request.tcp == "established")
    except (OverflowError, TimeoutError) as error:
        raise Refused(f"container {target.id} cannot be checkpointed: {error}; it continues as before") from None
    return Chosen(thread_settings.chosen(pids, target.init_pid), sockets)


async def _set_frozen(target: Target, frozen: bool) -> None:
    """Freeze or thaw, unless the container has ended meanwhile."""
    if target.cgroup is None or not target.cgroup.exists:
        return
    try:
        await to_the_end(target.cgroup.freeze if frozen else target.cgroup.thaw)
    except FileNotFoundError:
        pass  # it ended between the look and the order

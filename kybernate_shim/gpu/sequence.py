"""The order of the driver's steps for all processes of a container, and how they are undone when one of them fails.

    suspend:  look, lock all, (offload all,) checkpoint all     undone by: restore, reload, unlock
    resume:   restore all, reload all, unlock all               undone by: checkpoint again

An offload moves VRAM into the node's arena, at the speed of the GPU's link, where a program has loaded the preload
library; what is not offloaded takes the driver's path. A reload moves it back; an unlock first reloads what was not
reloaded.

An undo relies on what the driver reports about each process, not on which calls were made: a call that was given up may
have been carried out. No process stays locked, whether a step failed, was too slow, or its task was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kybernate_shim.gpu.errors import CudaError, CudaHelperLost, GpuPair
from kybernate_shim.gpu.evidence import seen
from kybernate_shim.gpu.helper_answers import ArenaMoved, RoomComing, State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.processes import ListPids, lock_all
from kybernate_shim.steps import Step

T = TypeVar("T")
# Of pids, and the bytes offloaded before; it yields whether it has stopped their threads.
Around = Callable[[Sequence[int], int], AbstractAsyncContextManager[bool]]


@dataclass(frozen=True)
class StepSeconds:
    """How long each step may take, in seconds.

    `settle` is how long an undo waits for a call that was given up: the driver carries it out all the same, and reports
    the state only afterwards. Source: measured with driver 580.159.04, its caller killed in the middle.
    """

    lock: float = 60.0
    checkpoint: float = 600.0
    restore: float = 600.0
    unlock: float = 30.0
    settle: float = 120.0


@dataclass
class Suspended:
    """The processes that `suspend` has checkpointed, without those that already were, and the time of each step.

    The steps are over all processes: "cuda-lock", "cuda-checkpoint", "cuda-restore" or "cuda-unlock". Where the arena
    was used, "arena-take" or "arena-give" comes between, with the bytes that it moved.
    """

    pids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    taken: ArenaMoved = field(default_factory=ArenaMoved)  # what is in the arena


@dataclass(frozen=True)
class Ahead:
    """A process whose bytes may be copied from the arena to its GPU before it is there, if so many bytes stay free.

    `room_comes`: another process is giving up room there, which is waited for.
    """

    pid: int
    gpu: str
    free_bytes: int
    room_comes: bool = False


DEFAULT_LIMITS = StepSeconds()
ATTEMPTS = 2  # of an undo: a helper that was lost under the first is replaced for the second
PROOF_SECONDS = 1.0  # after a failure: for another one that is its cause, and may be reported later
NOT_COMPUTING = (State.LOCKED, State.CHECKPOINTED, State.FAILED, State.UNKNOWN)


async def suspend(
    helper: CudaHelper,
    list_pids: ListPids,
    limits: StepSeconds = DEFAULT_LIMITS,
    *,
    record: Callable[[Sequence[int]], None] = lambda pids: None,
    last_look: Callable[[Sequence[int]], None] | None = None,
    while_locked: Callable[[Sequence[int]], Awaitable[None]] | None = None,
    around: Around = lambda pids, offloaded: nullcontext(False),
    arena: bool = False,
) -> Suspended:
    """Move the VRAM of every process that `list_pids` lists into host memory; the GPUs are free afterwards.

    With `arena`, as much of it as possible moves into the node's arena, which is not their own memory: a dump of
    the processes must not need those bytes.

    `record` receives all processes that may be locked by now, each time before more are locked. `last_look` receives
    them when all are locked, and may raise a CudaError; it reads the processes, so it runs apart from the event loop,
    and TimeoutError is raised where they keep it waiting. `while_locked` then does what must be done before they
    change. `around` encloses the checkpoint of locked processes, and receives how much of them was offloaded; it must
    not raise by itself.
    Raises a CudaError, or TimeoutError, when a step fails, after every process has been brought back to computing.
    Where that failed as well, the notes of the error name the processes and what is wrong with them.
    """
    suspended = Suspended()
    touched: list[int] = []

    def remember(pids: Sequence[int]) -> None:
        touched.extend(pids)
        record(touched)

    if arena:
        await _warm(helper, list(list_pids()), limits)
    try:
        suspended.pids = await _timed(
            suspended.steps, "cuda-lock", lock_all(helper, list_pids, limits.lock, locked=remember)
        )
        if last_look is not None:
            await seen(partial(last_look, suspended.pids))
        if while_locked is not None:
            await while_locked(suspended.pids)
        if arena:
            offload = helper.offload(suspended.pids, limits.checkpoint)
            suspended.taken = await _moved(suspended.steps, "arena-take", offload)
        async with around(suspended.pids, suspended.taken.bytes) as stopped:
            checkpoint = helper.checkpoint(suspended.pids, limits.checkpoint, threads_stopped=stopped)
            try:
                await _timed(suspended.steps, "cuda-checkpoint", checkpoint)
            except BaseException:
                if stopped:  # and stay so until the driver is done: it may take away what they would read
                    await undisturbed(_failure_of(helper.states(suspended.pids, limits.settle)))
                raise
    except BaseException as error:  # CancelledError included: cancelled must not mean locked forever
        await undisturbed(_add_notes(error, bring_back(helper, touched, limits)))
        raise
    return suspended


async def resume(
    helper: CudaHelper,
    pids: Sequence[int],
    pairs: Sequence[GpuPair] = (),
    limits: StepSeconds = DEFAULT_LIMITS,
    *,
    proof: Callable[[], Coroutine[Any, Any, None]] | None = None,
    room: Callable[[], Awaitable[object]] | None = None,
    coming: RoomComing | None = None,
    ahead: Sequence[Ahead] = (),
    taken: Callable[[], object] = lambda: None,
) -> list[Step]:
    """Move the VRAM of checkpointed processes back, by the GPU map `pairs` if there is one, and let them compute.

    `proof` runs at the same time, and nothing computes before it is done; what it raises leaves the processes locked,
    since their memory is wrong. `room` returns when the GPUs have room for what the arena has of them, which another
    process may be about to free, or for the first of it, where the rest is `coming`; what it raises is a failure. What
    is `ahead` is copied while the driver works. `taken` is called when the processes have all of the GPUs' memory that
    they need.
    Raises a CudaError when a restore fails, after the processes that were restored have been checkpointed again, so
    that all of them can be resumed later. An unlock that fails is raised after the others have been unlocked.
    """
    steps: list[Step] = []
    proving = asyncio.ensure_future(proof()) if proof is not None else None
    prefetching = asyncio.ensure_future(_prefetch(helper, ahead, limits))
    try:
        await _timed(steps, "cuda-restore", helper.restore(pids, limits.restore, pairs))
        await prefetching
        if room is not None:
            await room()
        await _moved(steps, "arena-give", helper.reload(pids, limits.restore, coming))
        taken()
    except BaseException as error:
        prefetching.cancel()
        cause = await undisturbed(_failure_of_proof(proving)) if isinstance(error, CudaError) else None
        if proving is not None:
            proving.cancel()
        await undisturbed(_add_notes(error, _suspend_again(helper, pids, limits)))
        if cause is not None:
            cause.add_note(str(error))
            raise cause from error
        raise
    if proving is not None:
        await _timed(steps, "vram-proof", proving)
    try:
        await _timed(steps, "cuda-unlock", helper.unlock(pids, limits.unlock))
    except BaseException as error:
        await undisturbed(_add_notes(error, bring_back(helper, pids, limits)))
        raise
    return steps


async def bring_back(helper: CudaHelper, pids: Sequence[int], limits: StepSeconds = DEFAULT_LIMITS) -> list[str]:
    """Make processes compute again, whatever state they are in; return a line for each that does not, and why.

    For an undo, and for processes that an earlier caller left behind. A call that hung may still run in the driver: the
    request for the state waits for it.
    """
    reasons: list[str] = []
    for _ in range(ATTEMPTS):
        checkpointed = (await _in_state(helper, pids, limits))[State.CHECKPOINTED]
        reasons += await _failure_of(helper.restore(checkpointed, limits.restore))
        locked = (await _in_state(helper, pids, limits))[State.LOCKED]
        reasons += await _failure_of(helper.unlock(locked, limits.unlock))
        left = await _in_state(helper, pids, limits)
        stuck = [f"process {pid} is {state.name.lower()}" for state in NOT_COMPUTING for pid in left[state]]
        if not stuck:
            return []
    return stuck + list(dict.fromkeys(reasons))


async def _failure_of_proof(proving: asyncio.Future[None] | None) -> BaseException | None:
    """Return the failure of the proof, if the memory could not be brought back because it is wrong."""
    if proving is None:
        return None
    await asyncio.wait([proving], timeout=PROOF_SECONDS)
    return proving.exception() if proving.done() and not proving.cancelled() else None


async def _warm(helper: CudaHelper, pids: Sequence[int], limits: StepSeconds) -> None:
    """Prepare the arena before any process is frozen; a fault of the arena shows when the arena is needed."""
    try:
        await helper.warm(pids, limits.checkpoint)
    except CudaHelperLost:
        pass


async def _prefetch(helper: CudaHelper, ahead: Sequence[Ahead], limits: StepSeconds) -> None:
    """Begin the copies; a fault of the arena shows when it is needed."""
    for one in ahead:
        with suppress(CudaError):
            await helper.prefetch(one.pid, one.gpu, one.free_bytes, limits.restore, room_comes=one.room_comes)


async def _suspend_again(helper: CudaHelper, pids: Sequence[int], limits: StepSeconds) -> list[str]:
    """Undo a restore that only some processes went through; return what fails."""
    locked = (await _in_state(helper, pids, limits))[State.LOCKED]
    return await _failure_of(helper.checkpoint(locked, limits.checkpoint))


async def _in_state(helper: CudaHelper, pids: Sequence[int], limits: StepSeconds) -> dict[State, list[int]]:
    """Sort `pids` by their states; the ones that do not answer are UNKNOWN, the ones that are gone are left out."""
    states = await helper.states(list(pids), limits.settle)
    found: dict[State, list[int]] = {state: [] for state in State}
    for process in states.processes.values():
        found[process.state].append(process.pid)
    found[State.UNKNOWN] += states.unknown
    return found


async def _failure_of(call: Coroutine[Any, Any, object]) -> list[str]:
    """Make a call of an undo; return its failure, which must not end the undo."""
    try:
        await call
    except CudaError as error:
        return [str(error)]
    return []


async def _add_notes(error: BaseException, undo: Coroutine[Any, Any, list[str]]) -> None:
    try:
        failures = await undo
    except CudaError as second:
        failures = [str(second)]
    for failure in failures:
        error.add_note(f"not undone: {failure}")


async def undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, also when this task is cancelled meanwhile; the cancellation is raised afterwards.

    What `work` itself raises takes precedence: it may mean that nothing must continue.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _moved(steps: list[Step], name: str, work: Coroutine[Any, Any, ArenaMoved]) -> ArenaMoved:
    """Do as `_timed` does with a step of the arena, which is recorded only where it moved something."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    offloaded = await work
    if offloaded.bytes:
        steps.append(Step(name, loop.time() - began, offloaded.bytes, offloaded.spared))
    return offloaded


async def _timed(steps: list[Step], name: str, work: Awaitable[T]) -> T:
    loop = asyncio.get_running_loop()
    began = loop.time()
    result = await work
    steps.append(Step(name, loop.time() - began))
    return result

"""The operations that faults are injected into, as a container's daemon does them on the processes of one or two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.sequence import Ahead, StepSeconds, Suspended, bring_back, resume, suspend, undisturbed
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover import arena_files
from tests.faults.bench import MIB, PATIENCE, Bench

LIMITS = StepSeconds(lock=PATIENCE, checkpoint=PATIENCE, restore=PATIENCE, unlock=PATIENCE, settle=PATIENCE)
ROOM = 64 * MIB  # that a prefetch leaves free on a GPU
HOW = CopyOptions(threads=1)
ATTEMPTS, PAUSE = 100, 0.2  # to bring a process back whose driver hangs for a while
Act = Callable[[Bench, StepSeconds], Awaitable[Sequence[Suspended]]]


@dataclass(frozen=True)
class Operation:
    """What is done, by `act`, to the programs of which `away` are suspended before; `left` are suspended afterwards.

    After a failure, those that it has to do with are as before or after, or half way where it has `between`.
    `cold`: by a worker of the arena that has done nothing yet. `short_of` is what it may find full.
    """

    name: str
    away: str
    act: Act
    left: str
    cold: bool = False
    between: str = ""
    short_of: tuple[str, ...] = ()


async def leave(bench: Bench, names: str, limits: StepSeconds, *, arena: bool = True) -> list[Suspended]:
    pids = [bench.tenants[name].pid for name in names]
    return [await suspend(bench.helper, lambda: pids, limits, arena=arena)]


async def come(bench: Bench, names: str, limits: StepSeconds, **options: object) -> list[Suspended]:
    await resume(bench.helper, [bench.tenants[name].pid for name in names], limits=limits, **options)  # type: ignore[arg-type]
    return []


def ahead(bench: Bench, name: str) -> list[Ahead]:
    return [Ahead(bench.tenants[name].pid, bench.gpus.uuids[0], ROOM)]


async def prefetch(bench: Bench, limits: StepSeconds) -> list[Suspended]:
    return await come(bench, "a", limits, ahead=ahead(bench, "a"))


async def swap(bench: Bench, limits: StepSeconds) -> list[Suspended]:
    """Suspend a, and resume b, which waits for a's room; if either fails, both do what they can."""
    gone = asyncio.Event()

    async def out() -> list[Suspended]:
        try:
            return await leave(bench, "a", limits)
        finally:
            gone.set()

    async def wait() -> None:
        await gone.wait()

    done = await asyncio.gather(
        out(), come(bench, "b", limits, room=wait, ahead=ahead(bench, "b")), return_exceptions=True
    )
    failed = [one for one in done if isinstance(one, BaseException)]
    for other in failed[1:]:
        failed[0].add_note(f"also: {other}")
        failed[0].__notes__.extend(getattr(other, "__notes__", []))
    if failed:
        raise failed[0]
    return [one for found in done if not isinstance(found, BaseException) for one in found]


async def checkpoint(bench: Bench, limits: StepSeconds) -> list[Suspended]:
    """Suspend a and c, write what the arena has of them into an image, and resume them."""
    done = await leave(bench, "ac", limits)
    try:
        await undisturbed(_write(bench))
    finally:
        await come(bench, "ac", limits)
    return done


async def _write(bench: Bench) -> None:
    pid = bench.tenants["a"].pid
    path = bench.images / "image"
    path.unlink(missing_ok=True)
    kept = arena_files.hold(bench.memory, [pid])[pid]
    try:
        if kept:
            arena_files.save(bench.memory, kept, path, HOW, pid=pid)
    finally:
        arena_files.let_go(bench.memory)


async def restore(bench: Bench, limits: StepSeconds) -> list[Suspended]:
    """Bring a back as a restored process: its bytes are read from an image into other room, and handed over to it."""
    pid = bench.tenants["a"].pid
    path = bench.images / "image"
    path.unlink(missing_ok=True)
    image = [arena_files.save(bench.memory, arena_files.hold(bench.memory, [pid])[pid], path, HOW, pid=pid)]
    arena_files.let_go(bench.memory)
    shares = arena_files.claim(bench.memory, image)
    try:
        await bench.helper.expect(os.getpid(), bench.gpus.uuids[:1], limits.restore)
    except CudaError:
        pass  # nothing depends on it
    arena_files.load(bench.memory, image, shares, path.parent, HOW)
    arena_files.hand_over(bench.memory, {pid: shares[0]})
    return await come(bench, "a", limits, ahead=ahead(bench, "a"))


OPERATIONS = [
    Operation("suspend", "", lambda bench, limits: leave(bench, "a", limits), "a", short_of=("arena",)),
    Operation("suspend by a new worker", "", lambda bench, limits: leave(bench, "a", limits), "a", cold=True),
    Operation("suspend several", "", lambda bench, limits: leave(bench, "abc", limits), "abc", short_of=("arena",)),
    Operation("suspend without the arena", "", lambda bench, limits: leave(bench, "ac", limits, arena=False), "ac"),
    Operation("resume", "a", lambda bench, limits: come(bench, "a", limits), "", short_of=("gpu",)),
    Operation("resume by a new worker", "a", lambda bench, limits: come(bench, "a", limits), "", cold=True),
    Operation("resume several", "abc", lambda bench, limits: come(bench, "abc", limits), ""),
    Operation("resume without the arena", "c", lambda bench, limits: come(bench, "c", limits), ""),
    Operation("prefetch", "a", prefetch, "", short_of=("gpu",)),
    Operation("swap", "b", swap, "a", between="ab", short_of=("arena",)),
    Operation("checkpoint", "", checkpoint, "", between="ac", short_of=("arena", "images")),
    Operation("restore", "a", restore, "", short_of=("gpu",)),
]


async def recover(bench: Bench) -> list[str]:
    """Bring back whatever is suspended or locked, as `kybernate resume` does, again and again; return what is wrong."""
    for _ in range(ATTEMPTS):
        if not (wrong := await _recover(bench)):
            break
        await asyncio.sleep(PAUSE)
    return wrong


async def _recover(bench: Bench) -> list[str]:
    helper, pids = bench.helper, bench.pids
    states = (await helper.states(pids, PATIENCE)).processes
    try:
        await helper.unlock([pid for pid in pids if pid in states and states[pid].state is State.LOCKED], PATIENCE)
        await resume(
            helper, [pid for pid in pids if pid in states and states[pid].state is State.CHECKPOINTED], limits=LIMITS
        )
    except CudaError as error:
        return [f"{error}", *await bring_back(helper, pids, LIMITS)]
    return []

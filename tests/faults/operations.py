"""The operations that faults are injected into, as a container's daemon does them on the processes of one or two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kybernate_shim.cuda.arena import saved
from kybernate_shim.cuda.client import State
from kybernate_shim.cuda.errors import CudaError
from kybernate_shim.cuda.sequence import Ahead, Limits, Suspended, bring_back, resume, suspend, undisturbed
from kybernate_shim.cuda.vram.crew import Transfer
from tests.faults.bench import MIB, PATIENCE, Bench

LIMITS = Limits(lock=PATIENCE, checkpoint=PATIENCE, restore=PATIENCE, unlock=PATIENCE, settle=PATIENCE)
ROOM = 64 * MIB  # that a prefetch leaves free on a card
HOW = Transfer(threads=1)
ATTEMPTS, PAUSE = 100, 0.2  # to bring a process back whose driver hangs for a while
Act = Callable[[Bench, Limits], Awaitable[Sequence[Suspended]]]


@dataclass(frozen=True)
class Operation:
    """What is done, by `act`, to the programs of which `away` are suspended before; `left` are suspended afterwards.

    After a failure, those that it has to do with are as before or after, or half way where it has `between`.
    `cold`: by a worker of the arena that has done nothing yet.
    """

    name: str
    away: str
    act: Act
    left: str
    cold: bool = False
    between: str = ""


async def leave(bench: Bench, names: str, limits: Limits, *, arena: bool = True) -> list[Suspended]:
    pids = [bench.tenants[name].pid for name in names]
    return [await suspend(bench.helper, lambda: pids, limits, arena=arena)]


async def come(bench: Bench, names: str, limits: Limits, **options: object) -> list[Suspended]:
    await resume(bench.helper, [bench.tenants[name].pid for name in names], limits=limits, **options)  # type: ignore[arg-type]
    return []


def ahead(bench: Bench, name: str) -> list[Ahead]:
    return [Ahead(bench.tenants[name].pid, bench.cards.uuids[0], ROOM)]


async def swap(bench: Bench, limits: Limits) -> list[Suspended]:
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


async def checkpoint(bench: Bench, limits: Limits) -> list[Suspended]:
    """Suspend a and c, write what the arena has of them into an image, and resume them."""
    done = await leave(bench, "ac", limits)
    await undisturbed(_write(bench))
    await come(bench, "ac", limits)
    return done


async def _write(bench: Bench) -> None:
    pid = bench.tenants["a"].pid
    path = bench.root / "image"
    path.unlink(missing_ok=True)
    kept = saved.hold(bench.memory, [pid])[pid]
    try:
        if kept:
            saved.save(bench.memory, kept, path, HOW)
    finally:
        saved.let_go(bench.memory)


async def restore(bench: Bench, limits: Limits) -> list[Suspended]:
    """Bring a back as a restored process: its bytes are read from an image into other room, and handed over to it."""
    pid = bench.tenants["a"].pid
    path = bench.root / "image"
    path.unlink(missing_ok=True)
    image = [saved.save(bench.memory, saved.hold(bench.memory, [pid])[pid], path, HOW)]
    saved.let_go(bench.memory)
    shares = saved.claim(bench.memory, image)
    try:
        await bench.helper.expect(os.getpid(), bench.cards.uuids[:1], limits.restore)
    except CudaError:
        pass  # nothing depends on it
    saved.load(bench.memory, image, shares, path.parent, HOW)
    saved.hand_over(bench.memory, {pid: shares[0]})
    return await come(bench, "a", limits, ahead=ahead(bench, "a"))


OPERATIONS = [
    Operation("suspend", "", lambda bench, limits: leave(bench, "a", limits), "a"),
    Operation("suspend by a new worker", "", lambda bench, limits: leave(bench, "a", limits), "a", cold=True),
    Operation("suspend several", "", lambda bench, limits: leave(bench, "abc", limits), "abc"),
    Operation("suspend without the arena", "", lambda bench, limits: leave(bench, "ac", limits, arena=False), "ac"),
    Operation("resume", "a", lambda bench, limits: come(bench, "a", limits), ""),
    Operation("resume by a new worker", "a", lambda bench, limits: come(bench, "a", limits), "", cold=True),
    Operation("resume several", "abc", lambda bench, limits: come(bench, "abc", limits), ""),
    Operation("resume without the arena", "c", lambda bench, limits: come(bench, "c", limits), ""),
    Operation("prefetch", "a", lambda bench, limits: come(bench, "a", limits, ahead=ahead(bench, "a")), ""),
    Operation("swap", "b", swap, "a", between="ab"),
    Operation("checkpoint", "", checkpoint, "", between="ac"),
    Operation("restore", "a", restore, ""),
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

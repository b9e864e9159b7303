"""Two containers change places on their GPUs: the one comes as far as it can while the other leaves.

What is coming asks its shim to wait for room, and is restored up to the point where it needs it; what is leaving frees
its memory long before its own last step. So both together take little longer than either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NothingToCancel, Shim, ShimRefused, shim_of
from kybernate_shim.messages.shim_pb2 import ResumeRequest, ResumeResponse, SuspendRequest, SuspendResponse

BEGIN_SECONDS = 2.0
LOOK_SECONDS = 0.002


class NotSwapped(Failure):
    """A swap failed; the message and the state say who is where. `undone`: both are where they were."""

    def __init__(self, message: str, *, state: str = "", advice: str = "", undone: bool = True) -> None:
        super().__init__(message, state=state, advice=advice)
        self.undone = undone


@dataclass(frozen=True)
class Swapped:
    """What the two shims answered, and how long both took together."""

    left: SuspendResponse
    came: ResumeResponse
    seconds: float


@dataclass(frozen=True)
class SwapNames:
    """The names of a swap's parts, for the shims; empty where the swap has none."""

    coming: str = ""
    leaving: str = ""
    undo: str = ""

    @staticmethod
    def of(operation: str) -> SwapNames:
        return SwapNames(*(f"{operation}.{part}" for part in ("in", "out", "undo"))) if operation else SwapNames()


async def swap(out: KnownContainer, back: KnownContainer, address: str, wait: float, *, operation: str = "") -> Swapped:
    """Suspend `out` and resume `back`, which waits so many seconds for room. Raises NotSwapped and Failure.

    With the name of an `operation`, a second call with the same name continues the first one, or has the same result.
    """
    if (out.namespace, out.id) == (back.namespace, back.id):
        raise NotSwapped(f"{out.title} cannot be swapped with itself")
    async with shim_of(out, address) as leaving, shim_of(back, address) as coming:
        began = time.monotonic()
        names = SwapNames.of(operation)
        resume = ResumeRequest(id=back.id, room_timeout_ms=round(wait * 1000), operation=names.coming)
        came = asyncio.create_task(coming.resume(resume))
        await _begun(coming, back.id, came)
        if came.done() and (failure := came.exception()):
            raise NotSwapped(f"{back.title} is not resumed: {failure}", state=f"{out.title} keeps running") from failure
        leave = asyncio.create_task(leaving.suspend(SuspendRequest(id=out.id, operation=names.leaving)))
        await asyncio.wait({leave, came}, return_when=asyncio.FIRST_EXCEPTION)
        if came.done() and came.exception():
            await _call_off(leaving, out, names.leaving, leave)
        try:
            left = await leave
        except Failure as error:
            if came.done() and (first := came.exception()):
                raise NotSwapped(f"{back.title} is not resumed: {first}", state=f"{out.title} keeps running") from first
            await _call_off(coming, back, names.coming, came)
            state, undone = await _fate(came, coming, back, names.undo, stays=partial(_is_active, leaving, out))
            raise NotSwapped(f"{out.title} is not suspended: {error}", state=state, undone=undone) from error
        try:
            return Swapped(left, await came, time.monotonic() - began)
        except Failure as error:
            state, undone = await _undone(leaving, out, names.undo)
            raise NotSwapped(f"{back.title} is not resumed: {error}", state=state, undone=undone) from error


async def _call_off(
    shim: Shim, container: KnownContainer, name: str, task: asyncio.Task[SuspendResponse] | asyncio.Task[ResumeResponse]
) -> None:
    """Undo the one side of a swap whose other side has failed, unless it has ended; how, `task` says."""
    if not task.done():
        with suppress(NothingToCancel):
            await shim.cancel(container.id, name)


async def _begun(shim: Shim, id: str, task: asyncio.Task[ResumeResponse]) -> None:
    """Wait until the shim has begun to resume, so that it holds its claim on the GPUs before they are freed."""
    until = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < until and not task.done():
        if any(status.phase == "resume" for status in await shim.status(id)):
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _is_active(shim: Shim, container: KnownContainer) -> bool:
    """Return whether a container that was to leave is on its GPUs; it may have ended."""
    try:
        return any(status.state != "stopped" and not status.suspended for status in await shim.status(container.id))
    except Failure:
        return False


async def _fate(
    came: asyncio.Task[ResumeResponse],
    coming: Shim,
    back: KnownContainer,
    name: str,
    *,
    stays: Callable[[], Awaitable[bool]],
) -> tuple[str, bool]:
    """Return what has become of the one that was to come, and whether that is what it was before.

    Where it came all the same, as after the helper's end in the middle, it leaves again for the one that `stays`: two
    that were to take turns must not both have the GPUs.
    """
    try:
        await came
    except Failure as error:
        if isinstance(error, ShimRefused) and error.code == "CANCELED":
            return f"{back.title} stays suspended", True
        return f"{back.title} stays suspended: {error}", True
    if not await stays():
        return f"{back.title} is resumed nevertheless, and runs", False
    try:
        await coming.suspend(SuspendRequest(id=back.id, operation=name))
    except Failure as error:
        return f"{back.title} is resumed nevertheless, and could not be suspended again: {error}", False
    return f"{back.title} is suspended again", True


async def _undone(leaving: Shim, out: KnownContainer, name: str) -> tuple[str, bool]:
    request = ResumeRequest(id=out.id, room_timeout_ms=round(BEGIN_SECONDS * 1000), operation=name)
    try:
        await leaving.resume(request)
    except Failure as error:
        return f"{out.title} is suspended, and could not be resumed: {error}", False
    return f"{out.title} is resumed, and runs", True

"""Two containers change places on their GPUs: the one comes as far as it can while the other leaves.

What is coming asks its shim to wait for room, and is restored up to the point where it needs it; what is leaving frees
its memory long before its own last step. So both together take little longer than either.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kybernate.node.failure import Failure
from kybernate.node.lookup import Container
from kybernate.node.shim import Shim, shim_of
from kybernate_shim.messages.shim_pb2 import ResumeRequest, ResumeResponse, SuspendRequest, SuspendResponse

BEGIN_SECONDS = 2.0
LOOK_SECONDS = 0.002


class NotSwapped(Failure):
    """A swap failed; the message and the state say who is where."""


@dataclass(frozen=True)
class Swapped:
    """What the two shims answered, and how long both took together."""

    left: SuspendResponse
    came: ResumeResponse
    seconds: float


async def swap(out: Container, back: Container, address: str, wait: float) -> Swapped:
    """Suspend `out` and resume `back`, which waits so many seconds for room. Raises NotSwapped and Failure."""
    if (out.namespace, out.id) == (back.namespace, back.id):
        raise NotSwapped(f"{out.title} cannot change places with itself")
    async with shim_of(out, address) as leaving, shim_of(back, address) as coming:
        began = time.monotonic()
        resume = ResumeRequest(id=back.id, room_timeout_ms=round(wait * 1000))
        came = asyncio.create_task(coming.resume(resume))
        await _begun(coming, back.id, came)
        if came.done() and (failure := came.exception()):
            raise NotSwapped(f"{back.title} does not come: {failure}", state=f"{out.title} computes on") from failure
        try:
            left = await leaving.suspend(SuspendRequest(id=out.id))
        except Failure as error:
            raise NotSwapped(f"{out.title} does not leave: {error}", state=await _fate(came, back)) from error
        try:
            return Swapped(left, await came, time.monotonic() - began)
        except Failure as error:
            raise NotSwapped(f"{back.title} does not come: {error}", state=await _undone(leaving, out)) from error


async def _begun(shim: Shim, id: str, task: asyncio.Task[ResumeResponse]) -> None:
    """Wait until the shim has begun to resume, so that it holds its claim on the GPUs before anybody leaves them."""
    until = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < until and not task.done():
        if any(status.phase == "resume" for status in await shim.status(id)):
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _fate(came: asyncio.Task[ResumeResponse], back: Container) -> str:
    try:
        await came
    except Failure as error:
        return f"{back.title} stays suspended: {error}"
    return f"{back.title} found room all the same, and computes"


async def _undone(leaving: Shim, out: Container) -> str:
    try:
        await leaving.resume(ResumeRequest(id=out.id, room_timeout_ms=round(BEGIN_SECONDS * 1000)))
    except Failure as error:
        return f"{out.title} is suspended, and could not be resumed: {error}"
    return f"{out.title} is back, and computes"

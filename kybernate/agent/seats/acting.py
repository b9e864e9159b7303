"""Carries the arbiter's actions out by the agent's operations, and returns what has become of them.

An operation is in the journal, is undone or found again after a restart as any other, and shows who has begun it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kybernate.agent.seats.claims import Key
from kybernate.agent.seats.former import AT_WORK
from kybernate.node.failure import Failure, Refused
from kybernate.verbs.model import SEAT, Operation, State, Submission
from kybernate.verbs.park import Park
from kybernate.verbs.swap import Swap
from kybernate.verbs.verb import Verb
from kybernate.verbs.wake import Sleep, Wake

if TYPE_CHECKING:
    from kybernate.agent.operations.engine import Engine

REQUESTER: Final = "arbiter of seats"
SECONDS: Final = 180.0  # of an operation; a driver that hangs in one of them keeps only its own seat's turn
SWAP_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Outcome:
    """What has become of an action. `seconds` is what the work itself took, without waits; 0 where it is not known."""

    succeeded: bool
    error: str = ""
    seconds: float = 0.0


class Acting:
    """Begins operations, and waits for their ends."""

    def __init__(self, engine: Engine, requester: str = REQUESTER) -> None:
        self._engine, self._requester = engine, requester

    async def wake(self, seat: str, key: Key) -> Outcome:
        """Bring a container's VRAM back."""
        return await self._done(seat, Wake(key[1], key[0]))

    async def suspend(self, seat: str, key: Key, *, again: bool = False) -> Outcome:
        """Move a container's VRAM into host memory. `again`: it was at work, which the journal notes."""
        return await self._done(seat, Sleep(key[1], key[0], gpu_only=True), again=again)

    async def swap(self, seat: str, out: Key, key: Key, *, again: bool = False) -> Outcome:
        """Do both at the same time; one after the other for containers of different namespaces.

        A swap never waits for another operation on one of the two, which may itself wait for the room that it makes.
        """
        if out[0] == key[0]:
            return await self._done(seat, Swap(out[1], key[1], key[0]), SWAP_SECONDS, again=again, immediate=True)
        left = await self.suspend(seat, out, again=again)
        return await self.wake(seat, key) if left.succeeded else left

    async def park(self, seat: str, key: Key) -> Outcome:
        """Move a suspended container's VRAM below host memory."""
        return await self._done(seat, Park(key[1], key[0]))

    async def ended(self, operation: str) -> Outcome:
        """Wait for the end of an operation that another caller has begun."""
        try:
            return _outcome(await self._last(operation))
        except Failure as error:
            return Outcome(False, str(error))

    async def cancel(self, operation: str) -> None:
        """Have an operation undone."""
        with suppress(Failure):  # it has ended, or does at its deadline
            await self._engine.cancel(operation)

    async def _done(
        self, seat: str, verb: Verb, seconds: float = SECONDS, *, again: bool = False, immediate: bool = False
    ) -> Outcome:
        labels = {SEAT: seat} if seat else {}
        if again:
            labels[AT_WORK] = "true"
        try:
            begun = await self._engine.submit(
                Submission(verb, requester=self._requester, seconds=seconds, labels=labels, immediate=immediate)
            )
            return _outcome(await self._last(begun.id))
        except Failure as error:
            return Outcome(False, str(error))

    async def _last(self, operation: str) -> Operation:
        last: Operation | None = None
        async for last in self._engine.watch(operation):
            if last.final:
                return last
        raise Refused(f"operation {operation} is not followed any more", state=f"it is {last.state}" if last else "")


def _outcome(operation: Operation) -> Outcome:
    if operation.state != State.SUCCEEDED:
        return Outcome(False, operation.fault.message if operation.fault else f"it was {operation.state}")
    measured = sum(step.seconds for step in operation.steps)
    return Outcome(True, seconds=measured or (operation.ended or 0.0) - (operation.started or 0.0))

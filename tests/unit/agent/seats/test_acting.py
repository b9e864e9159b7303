"""The arbiter's actions are operations, which others may come before, and which the journal knows again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from kybernate.agent.operations.engine import Engine
from kybernate.agent.seats.acting import OCCUPIED, Acting
from kybernate.agent.seats.former import AT_WORK
from kybernate.verbs.model import SEAT, Operation, State, Submission, Target

A, B = ("k8s.io", "a"), ("k8s.io", "b")


class FakeEngine:
    """Operations succeed, but a swap that was submitted while another operation has a container: it waits for that."""

    def __init__(self, *, occupied: bool = False) -> None:
        self.occupied = occupied
        self.submitted: list[Submission] = []
        self.cancelled: list[str] = []

    def holds(self, name: str, but: str = "") -> bool:
        return self.occupied and bool(self.submitted)

    async def submit(self, submission: Submission) -> Operation:
        self.submitted.append(submission)
        return Operation("1", submission.arguments, Target(), created=0)

    async def cancel(self, id: str) -> None:
        self.cancelled.append(id)

    async def watch(self, id: str) -> AsyncIterator[Operation]:
        pending = Operation("1", self.submitted[-1].arguments, Target(), created=0)
        yield pending
        if self.occupied and not self.cancelled:
            await asyncio.Event().wait()
        yield replace(pending, state=State.CANCELLED if self.cancelled else State.SUCCEEDED, ended=1.0)


def done(engine: FakeEngine, act: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(20):
            return await act(Acting(cast(Engine, engine)))

    return asyncio.run(main())


def test_swap_does_not_wait_for_an_operation_that_waits_for_its_room() -> None:
    engine = FakeEngine(occupied=True)
    outcome = done(engine, lambda acting: acting.swap("g0-s0", A, B))
    assert (outcome.succeeded, outcome.error, engine.cancelled) == (False, OCCUPIED, ["1"])


@pytest.mark.parametrize("again", [True, False])
def test_journal_notes_what_left_at_work(again: bool) -> None:
    engine = FakeEngine()
    assert done(engine, lambda acting: acting.swap("g0-s0", A, B, again=again)).succeeded
    assert done(engine, lambda acting: acting.suspend("g0-s0", A, again=again)).succeeded
    expected = {SEAT: "g0-s0"} | ({AT_WORK: "true"} if again else {})
    assert [one.labels for one in engine.submitted] == [expected, expected]

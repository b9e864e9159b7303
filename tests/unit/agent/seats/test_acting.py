"""The arbiter's actions are operations, which the journal knows again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kybernate.agent.operations.engine import Engine
from kybernate.agent.seats.acting import Acting
from kybernate.agent.seats.former import AT_WORK
from kybernate.verbs.model import SEAT, Operation, State, Submission, Target

A, B = ("k8s.io", "a"), ("k8s.io", "b")


class FakeEngine:
    """All operations succeed."""

    def __init__(self) -> None:
        self.submitted: list[Submission] = []

    async def submit(self, submission: Submission) -> Operation:
        self.submitted.append(submission)
        return Operation("1", submission.arguments, Target(), created=0)

    async def watch(self, id: str) -> AsyncIterator[Operation]:
        yield Operation("1", self.submitted[-1].arguments, Target(), created=0, state=State.SUCCEEDED, ended=1.0)


def done(engine: FakeEngine, act: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(20):
            return await act(Acting(cast(Engine, engine)))

    return asyncio.run(main())


@pytest.mark.parametrize("again", [True, False])
def test_journal_notes_what_left_at_work(again: bool) -> None:
    engine = FakeEngine()
    assert done(engine, lambda acting: acting.swap("g0-s0", A, B, again=again)).succeeded
    assert done(engine, lambda acting: acting.suspend("g0-s0", A, again=again)).succeeded
    expected = {SEAT: "g0-s0"} | ({AT_WORK: "true"} if again else {})
    assert [one.labels for one in engine.submitted] == [expected, expected]


def test_a_swap_waits_for_no_other_operation() -> None:
    engine = FakeEngine()
    done(engine, lambda acting: acting.swap("g0-s0", A, B))
    assert [one.immediate for one in engine.submitted] == [True]

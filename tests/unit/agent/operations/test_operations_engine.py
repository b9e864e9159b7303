"""The engine as its callers see it: watching, cancelling, a full disk, callers that go away, the end of the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.operations import engine as module
from kybernate.agent.operations import progress
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.executor import Heard
from kybernate.agent.operations.progress import Track, seconds_left
from kybernate.agent.operations.store import SCHEMA
from kybernate.agent.operations.watchers import Watcher
from kybernate.messages import agent_pb2
from kybernate.node.failure import Invalid, Missing, Refused, Unavailable
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.every import VERBS
from kybernate.verbs.importing import Import
from kybernate.verbs.model import (
    Arguments,
    Limits,
    Observation,
    Operation,
    Report,
    Result,
    Seen,
    State,
    Step,
    Submission,
    Target,
)
from kybernate.verbs.swap import Swap
from tests.unit.agent.operations.world import Events

DEADLINE = 20.0
ASK = Submission(Checkpoint("web"))


async def eventually(look: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not look():  # noqa: ASYNC110  # nothing that is looked at here has an event
            await asyncio.sleep(0.005)
    assert look(), what


@dataclass
class Script:
    """An executor whose operations end when a test says so. `seen` is what it finds of those that it does not do."""

    ends: dict[str, asyncio.Future[Result]] = field(default_factory=dict)
    heard: dict[str, Heard] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    seen: Observation = field(default_factory=lambda: Observation(Seen.ABSENT))
    comes_to: list[Arguments] = field(default_factory=list)  # what requests come to, each time that it is looked
    missing: Arguments | None = None

    verbs = VERBS

    async def meant(self, arguments: Arguments) -> Arguments:
        return self.comes_to.pop(0) if self.comes_to else arguments

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        if self.missing == arguments:
            raise Missing("it has no processes")
        name = getattr(arguments, "name", "x")
        return Target(container=name, title=name, holds=(name,))

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        end = self.ends[operation.id] = asyncio.get_running_loop().create_future()
        self.heard[operation.id] = heard
        return await end

    async def cancel(self, operation: Operation) -> None:
        self.cancelled.append(operation.id)
        self.ends[operation.id].set_exception(OperationUndone("undone"))

    async def observe(self, operation: Operation) -> Observation:
        return self.seen

    async def roll_back(self, operation: Operation) -> str:
        self.seen = Observation(Seen.ABSENT)
        return "removed"


@dataclass
class Agent:
    """A running engine over a journal, and what it says."""

    engine: Engine
    journal: Journal
    script: Script
    events: Events
    published: list[agent_pb2.Operation]

    async def begun(self, submission: Submission = ASK) -> Operation:
        one = await self.engine.submit(submission)
        await eventually(lambda: one.id in self.script.ends, "it runs")
        return one

    async def lost(self, id: str) -> None:
        seen = self.engine._attendance.seen
        await eventually(lambda: seen[id].seen == Seen.UNREACHABLE, "the engine knows that it lost sight of it")

    async def ended(self, id: str) -> Operation:
        async with asyncio.timeout(DEADLINE):
            return [one async for one in self.engine.watch(id)][-1]


@asynccontextmanager
async def agent(path: Path, script: Script | None = None, **options: Any) -> AsyncIterator[Agent]:
    script, events, published = script or Script(), Events(), list[agent_pb2.Operation]()
    journal = Journal(path / "journal", SCHEMA)
    engine = Engine(journal, script, events=events, publish=published.append, **options)
    running = asyncio.create_task(engine.run())
    try:
        yield Agent(engine, journal, script, events, published)
    finally:
        running.cancel()
        await asyncio.wait({running})
        journal.close()


def test_request_is_looked_at_again_where_its_container_ends_between_two_looks(tmp_path: Path) -> None:
    async def work() -> None:
        wanted = ASK.arguments
        async with agent(tmp_path, Script(comes_to=[wanted, Checkpoint("other")], missing=wanted)) as node:
            assert (await node.engine.submit(ASK)).arguments == Checkpoint("other")
            with pytest.raises(Missing, match="no processes"):
                await node.engine.submit(ASK)

    asyncio.run(work())


def test_what_is_to_begin_immediately_does_not_wait_for_another_operation(tmp_path: Path) -> None:
    async def work() -> None:
        immediate = replace(ASK, immediate=True)
        async with agent(tmp_path) as node:
            first = await node.begun(immediate)
            with pytest.raises(Refused, match=f"would wait for .* \\(operation {first.id}\\)"):
                await node.engine.submit(immediate)
            node.script.ends[first.id].set_result(Result())
            await node.ended(first.id)
            await node.begun(immediate)
            waits = await node.engine.submit(ASK)
            assert waits.state == State.PENDING
            with pytest.raises(Refused):
                await node.engine.submit(immediate)

    asyncio.run(work())


def test_watcher_sees_every_state_and_the_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.engine.submit(ASK)
            watching = asyncio.create_task(_states(node.engine, one.id))
            await eventually(lambda: one.id in node.script.ends, "it runs")
            node.script.heard[one.id](Report("dump", 5, 10))
            node.script.ends[one.id].set_result(Result(bytes=7, steps=(Step("dump", 1.0, 10),)))
            end = await node.ended(one.id)
            assert (end.state, end.result) == (State.SUCCEEDED, Result(bytes=7, steps=(Step("dump", 1.0, 10),)))
            assert (await watching)[-1] == State.SUCCEEDED
            assert (await node.engine.get(one.id)) == end
            assert [type for type, _, _ in node.events.said] == ["operation.started", "operation.succeeded"]
            assert node.published[-1].state == agent_pb2.SUCCEEDED

    asyncio.run(work())


def test_event_of_a_checkpoint_says_how_long_its_container_was_frozen(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.engine.submit(ASK)
            await eventually(lambda: one.id in node.script.ends, "it runs")
            node.script.ends[one.id].set_result(Result(frozen_ms=840))
            await node.ended(one.id)
            assert node.events.messages[-1].endswith("has ended as succeeded, frozen for 0.84 s")

    asyncio.run(work())


async def _states(engine: Engine, id: str) -> list[State]:
    return [one.state async for one in engine.watch(id)]


def test_progress_is_shown_a_few_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOW_SECONDS", 3600.0)

    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.begun()
            before = len(node.published)
            for done in range(1000):
                node.script.heard[one.id](Report("dump", done, 1000))
            assert len(node.published) - before <= 1
            shown = (await node.engine.get(one.id)).progress
            assert shown is not None
            assert (shown.step, shown.done_bytes, shown.total_bytes) == ("dump", 999, 1000)

    asyncio.run(work())


def test_track_ends_a_step_where_another_begins_and_estimates_the_rest() -> None:
    track = Track(100.0, 100.0).heard(Report("lock"), 101.0).heard(Report("dump", 0, 40), 103.0)
    track = track.heard(Report("dump", 10, 40), 105.0)
    assert track.steps == (Step("lock", 2.0),)
    assert (track.progress(105.0).seconds, track.progress(105.0).seconds_left) == (5.0, 6.0)
    assert track.progress(90.0).seconds == 0.0
    assert seconds_left(5, 0, 1) == seconds_left(0, 5, 1) == seconds_left(5, 5, 1) == seconds_left(1, 5, 0) == 0.0


def test_slow_watcher_holds_one_entry_for_each_state() -> None:
    async def work() -> None:
        watcher = Watcher()
        one = Operation("a", ASK.arguments, Target(), 1.0)
        for number in range(100):
            watcher.put(Operation("a", ASK.arguments, Target(), 1.0, state=State.RUNNING, revision=number))
        watcher.put(one)  # older than what is there
        watcher.put(Operation("a", ASK.arguments, Target(), 1.0, state=State.FAILED, revision=100))
        assert [found.revision async for found in watcher.read()] == [99, 100]

    asyncio.run(work())


def test_cancel_of_one_that_waits_is_immediate_and_of_one_that_runs_waits_for_its_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            first = await node.begun()
            second = await node.engine.submit(ASK)
            assert (await node.engine.cancel(second.id)).state == State.CANCELLED
            assert (await node.engine.cancel(first.id)).state == State.CANCELLING
            assert (await node.ended(first.id)).state == State.CANCELLED
            assert (await node.engine.cancel(first.id)).state == State.CANCELLED
            assert node.script.cancelled == [first.id]
            with pytest.raises(Missing, match=r"there is no operation|could be changed"):
                await node.engine.cancel("unknown")

    asyncio.run(work())


def test_deadline_undoes_what_runs(tmp_path: Path) -> None:
    now = [1000.0]

    async def work() -> None:
        async with agent(tmp_path, clock=lambda: now[0], limits=lambda: Limits(deadline=5)) as node:
            one = await node.begun()
            now[0] += 5
            node.engine.wake()
            end = await node.ended(one.id)
            assert end.fault is not None
            assert (end.state, end.fault.type) == (State.FAILED, "TimedOut")

    asyncio.run(work())


def test_caller_that_goes_away_leaves_an_operation_that_runs(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            asking = asyncio.create_task(node.engine.submit(ASK))
            await asyncio.sleep(0)
            asking.cancel()
            await eventually(lambda: bool(node.script.ends), "it runs all the same")

    asyncio.run(work())


def test_requests_with_one_key_at_the_same_time_are_one_operation(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            ask = Submission(ASK.arguments, key="k")
            found = await asyncio.gather(*(node.engine.submit(ask) for _ in range(10)))
            assert len({one.id for one in found}) == 1
            assert len(await node.engine.list()) == 1

    asyncio.run(work())


def test_end_that_the_journal_cannot_take_is_kept_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)

    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.begun()
            pages = node.journal._connection.execute("PRAGMA page_count").fetchone()[0]
            node.journal._connection.execute(f"PRAGMA max_page_count = {pages}")
            notes = ("x" * 100_000,)  # more than there is room for
            node.script.ends[one.id].set_result(Result(bytes=7, arena_reasons=notes))
            await eventually(lambda: "written to the journal" in str(node.published[-1].notes), "it is said")
            with pytest.raises(JournalUnusable):
                await node.engine.submit(Submission(Checkpoint("b", path="y" * 4000)))
            assert (await node.engine.get(one.id)).state == State.RUNNING
            node.journal._connection.execute("PRAGMA max_page_count = 100000")
            assert (await node.ended(one.id)).result == Result(bytes=7, arena_reasons=notes)
            await eventually(lambda: ("operation.journalled", "warning", one.id) in node.events.said, "it is an event")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (Observation(Seen.SUCCEEDED, "its image is whole", result=Result(bytes=3)), State.SUCCEEDED),
        (Observation(Seen.CANCELLED, "undone"), State.CANCELLED),
    ],
)
def test_restarted_agent_finds_what_happened_and_says_so(tmp_path: Path, seen: Observation, state: State) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.begun()
        async with agent(tmp_path, Script(seen=seen)) as node:
            end = await node.ended(one.id)
            assert (end.state, end.result) == (state, seen.result)
            assert seen.note in end.notes[0]
            assert node.events.said[0] == ("operation.recovered", "warning", one.id)

    asyncio.run(work())


def test_restarted_agent_rolls_back_what_is_half_done_and_begins_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            one = await node.begun()
        async with agent(tmp_path, Script(seen=Observation(Seen.HALF_DONE, "half"))) as node:
            await eventually(lambda: one.id in node.script.ends, "it runs again")
            found = await node.engine.get(one.id)
            assert found.attempts == 2
            assert "half" in found.notes[0]
            assert "second time" in found.notes[1]

    asyncio.run(work())


def test_lost_connection_ends_nothing_before_the_outcome_is_known(tmp_path: Path) -> None:
    now = [1000.0]

    async def work() -> None:
        seen = Observation(Seen.SUCCEEDED, result=Result(bytes=3))
        async with agent(tmp_path, Script(seen=seen), clock=lambda: now[0]) as node:
            one = await node.begun()
            node.script.ends[one.id].set_exception(OutcomeUnknown("the connection was lost"))
            await node.lost(one.id)
            now[0] += 10
            node.engine.wake()
            end = await node.ended(one.id)
            assert end.state == State.SUCCEEDED
            assert "the connection was lost" in end.notes[0]

    asyncio.run(work())


def test_error_without_end_gives_up(tmp_path: Path) -> None:
    now = [1000.0]

    async def work() -> None:
        async with agent(tmp_path, clock=lambda: now[0]) as node:
            one = await node.begun()
            for _ in range(3):
                await eventually(lambda: one.id in node.script.ends, "it runs")
                node.script.ends.pop(one.id).set_exception(ZeroDivisionError("a defect"))
                await node.lost(one.id)
                now[0] += 10
                node.engine.wake()
            end = await node.ended(one.id)
            assert end.fault is not None
            assert end.fault.type == "Failure"
            assert "ZeroDivisionError: a defect" in end.notes[0]

    asyncio.run(work())


def test_draining_engine_begins_nothing_and_names_what_runs(tmp_path: Path) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            one, second = await node.begun(), await node.engine.submit(ASK)
            assert [found.id for found in await node.engine.drain()] == [one.id]
            with pytest.raises(Unavailable, match="agent is stopping"):
                await node.engine.submit(ASK)
            node.script.ends[one.id].set_result(Result())
            await node.ended(one.id)
            assert (await node.engine.get(second.id)).state == State.PENDING
        async with agent(tmp_path) as node:
            await eventually(lambda: second.id in node.script.ends, "the next agent begins it")

    asyncio.run(work())


def test_ended_operations_are_removed_after_some_days(tmp_path: Path) -> None:
    forgotten: list[str] = []
    now = [1000.0]

    async def work() -> None:
        options = {"forget": lambda message: forgotten.append(message.id), "clock": lambda: now[0]}
        async with agent(tmp_path, **options) as node:
            one = await node.begun()
            node.script.ends[one.id].set_result(Result())
            await node.ended(one.id)
            now[0] += 8 * 86400
            node.engine.wake()
            await eventually(lambda: forgotten == [one.id], "it is removed")
            with pytest.raises(Missing, match=r"there is no operation|could be changed"):
                await node.engine.get(one.id)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("submission", "field"),
    [
        (Submission(Checkpoint("")), "name"),
        (Submission(Checkpoint("a", tcp="maybe")), "tcp"),
        (Submission(Checkpoint("a\0b")), "name"),
        (Submission(Checkpoint("a" * 5000)), "name"),
        (Submission(Swap("a", "a")), "coming"),
        (Submission(Import("")), "path"),
        (Submission(Checkpoint("a"), key="k" * 300), "idempotency_key"),
        (Submission(Checkpoint("a"), seconds=-1), "deadline"),
        (Submission(Checkpoint("a"), seconds=float("nan")), "deadline"),
        (Submission(Checkpoint("a"), labels={str(number): "" for number in range(65)}), "labels"),
    ],
)
def test_request_that_means_nothing_is_refused(tmp_path: Path, submission: Submission, field: str) -> None:
    async def work() -> None:
        async with agent(tmp_path) as node:
            with pytest.raises(Invalid, match=field):
                await node.engine.submit(submission)
            assert await node.engine.list() == []

    asyncio.run(work())

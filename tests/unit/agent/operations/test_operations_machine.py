"""Operations, crashes and restarts in any order: each ends once, as the world shows, and none is forgotten.

The engine runs over a real journal file, in a simulated node. It is killed before or after any of its writes and
effects, the file is opened again, and another engine continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kybernate.agent.journal import JournalUnusable
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.store import SCHEMA, decode, fingerprint
from kybernate.messages import agent_pb2
from kybernate.node.failure import Claimed, Exhausted, Missing
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.every import VERBS
from kybernate.verbs.export import Export
from kybernate.verbs.model import FINAL, MOVES, Arguments, Limits, Operation, State, Submission
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.swap import Swap
from tests.unit.agent.operations.world import Crash, CrashingJournal, Events, Shim, SimulatedExecutor, World

LIMITS = Limits(copies_per_gpu=2, copies_per_disk=1, pending=8)
QUIET_ROUNDS = 12  # of the event loop without a step of the agent: then all of it waits
FINISH_ROUNDS = 60
containers = st.sampled_from("abc")
requests = st.one_of(
    st.builds(Checkpoint, containers),
    st.builds(Suspend, containers),
    st.builds(lambda pair: Swap(*pair), st.permutations("abc").map(lambda names: names[:2])),
    st.just(Export("image", "/archive")),
)
MAY_END: dict[State, set[str | None]] = {
    State.SUCCEEDED: {"succeeded", "died"},
    State.FAILED: {"failed", "died", None},
    State.CANCELLED: {"cancelled", "died", None},
}


class Operations(RuleBasedStateMachine):
    """An agent, its journal, and the node."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 1_700_000_000.0
        self.world, self.crash, self.events = World(), Crash(), Events()
        self.known: set[str] = set()  # operations that a caller has got
        self.keys: dict[str, tuple[str, str]] = {}  # by key: fingerprint and id that a caller has got
        self.flying: list[asyncio.Task[Operation]] = []
        self.finals: dict[str, tuple[State, str]] = {}
        self.published: dict[str, list[int]] = {}
        self.raised: list[Any] = []
        self.loop.set_exception_handler(lambda loop, context: self.raised.append(context))

    @initialize()
    def start(self) -> None:
        self.journal = CrashingJournal(Path(self.directory.name) / "journal", SCHEMA)
        self.journal._connection.execute("PRAGMA synchronous = OFF")  # power is not lost here
        self.journal.crash, self.journal.full = self.crash, lambda: self.world.full
        self.executor = SimulatedExecutor(self.world, self.crash)
        self.engine = Engine(
            self.journal,
            self.executor,
            events=self.events,
            publish=lambda message: self.published.setdefault(message.id, []).append(message.state),
            limits=lambda: LIMITS,
            clock=lambda: self.now,
            boot=str(self.world.boot),
        )
        self.running = self.loop.create_task(self.engine.run())
        self.settle()

    def settle(self) -> None:
        """Let the agent continue until all of it waits, and start it again where it was killed."""
        self.loop.run_until_complete(self._until_quiet())
        if self.crash.dead:
            self.restart()
        elif self.running.done():
            self.running.result()

    async def _until_quiet(self) -> None:
        self.engine.wake()
        quiet, steps = 0, -1
        while quiet < QUIET_ROUNDS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if steps == self.crash.steps else 0
            steps = self.crash.steps

    def restart(self) -> None:
        """Kill the agent, and start another one on what it has left."""
        self.crash.dead, self.crash.after = True, 0
        self.end_tasks()
        self.journal.close()
        self.known |= (
            {one.id for one in self.records()} if self.flying else set()
        )  # a caller may not have got its answer
        self.flying.clear()
        self.crash.dead = False
        self.start()

    def end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))

    def records(self) -> list[Operation]:
        """Return what the journal has, by a connection of our own."""
        with contextlib.closing(sqlite3.connect(Path(self.directory.name) / "journal")) as connection:
            connection.row_factory = sqlite3.Row
            return [decode(row, VERBS) for row in connection.execute("SELECT * FROM operations ORDER BY number")]

    # ---- callers

    @rule(
        arguments=requests,
        key=st.sampled_from(["", "", "k", "l"]),
        seconds=st.sampled_from([0.0, 0.0, 5.0]),
        twice=st.booleans(),
    )
    def submit(self, arguments: Arguments, key: str, seconds: float, twice: bool) -> None:
        submission = Submission(arguments, key=key, seconds=seconds)
        self.flying = [self.loop.create_task(self.engine.submit(submission)) for _ in range(1 + twice)]
        tasks = list(self.flying)
        self.settle()
        done = [task for task in tasks if task.done() and not task.cancelled()]
        self.flying = []
        ids = {task.result().id for task in done if not self.refused(task, submission)}
        self.known |= ids
        if key and ids:
            assert len(ids) == 1
            assert self.keys.setdefault(key, (fingerprint(submission), *ids)) == (fingerprint(submission), *ids)

    def refused(self, task: asyncio.Task[Operation], submission: Submission) -> bool:
        """Return whether a request was refused, for a good reason."""
        error = task.exception()
        if isinstance(error, JournalUnusable):
            assert self.world.full
        elif isinstance(error, Claimed):
            assert self.keys.get(submission.key, ("", ""))[0] != fingerprint(submission)
        elif isinstance(error, Exhausted):
            assert sum(not one.final for one in self.records()) >= LIMITS.pending
        elif error is not None:
            assert isinstance(error, Missing), repr(error)
        return error is not None

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.known)))
        task = self.loop.create_task(self.engine.cancel(id))
        self.settle()
        if task.done() and not task.cancelled() and task.exception() is not None:
            assert isinstance(task.exception(), JournalUnusable)
            assert self.world.full

    # ---- the node

    @precondition(lambda self: any(shim.working for shim in self.world.shims.values()))
    @rule(data=st.data(), fate=st.sampled_from(["succeeded", "succeeded", "failed", "cancelled"]))
    def shim_ends(self, data: st.DataObject, fate: Any) -> None:
        name = data.draw(st.sampled_from([name for name, shim in self.world.shims.items() if shim.working]))
        shim = self.world.shims[name]
        if fate == "cancelled" and shim.working not in shim.asked:
            return
        self.world.end(name, fate, image=self.is_checkpoint(shim.working))
        self.settle()

    def is_checkpoint(self, id: str) -> bool:
        return next(one for one in self.records() if one.id == id).verb == "checkpoint"

    @rule()
    def files_are_written(self) -> None:
        self.executor.proceed |= set(self.world.files)
        self.world.changed()
        self.settle()

    @precondition(lambda self: len(self.world.shims) > 1)
    @rule(data=st.data())
    def container_ends(self, data: st.DataObject) -> None:
        self.world.die(data.draw(st.sampled_from(sorted(self.world.shims))))
        self.settle()

    @precondition(lambda self: len(self.world.shims) < 3)
    @rule()
    def container_is_started(self) -> None:
        for name in "abc":
            self.world.shims.setdefault(name, Shim())

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.world.full = full
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(steps=st.integers(1, 25))
    def agent_is_killed_soon(self, steps: int) -> None:
        self.crash.after = steps

    @rule()
    def agent_is_killed(self) -> None:
        self.world.full = False
        self.restart()

    @rule()
    def node_is_rebooted(self) -> None:
        self.world.full = False
        for name in list(self.world.shims):
            self.world.die(name)
        self.world.boot += 1
        self.container_is_started()
        self.restart()

    # ---- what always holds

    @invariant()
    def nothing_is_forgotten_and_ends_stay(self) -> None:
        records = {one.id: one for one in self.records()} if hasattr(self, "journal") else {}
        assert records.keys() >= self.known
        for id, end in self.finals.items():
            assert (records[id].state, repr(records[id])) == end
        self.finals |= {one.id: (one.state, repr(one)) for one in records.values() if one.final}

    @invariant()
    def ends_agree_with_the_world(self) -> None:
        if not hasattr(self, "journal"):
            return
        for one in self.records():
            fate = self.world.fates.get(one.id)
            if one.final:
                late = one.fault is not None and one.fault.type == "TimedOut"
                assert (one.state, one.cause) != (State.CANCELLED, "deadline")
                assert fate in MAY_END[one.state] | ({"cancelled"} if late else set()), (one, fate)
                assert self.world.files.get(one.id) == (
                    "whole" if one.verb == "export" and fate == "succeeded" else None
                )
            elif one.state == State.PENDING:
                assert one.id not in self.world.fates

    @invariant()
    def limits_hold(self) -> None:
        assert self.world.violations == []
        assert self.raised == []
        begun = [one for one in self.records() if not one.final and one.state != State.PENDING] if self.known else []
        held = Counter(name for one in begun for name in one.target.holds)
        copies = Counter(name for one in begun for name in one.target.copies)
        assert all(count == 1 for count in held.values())
        assert copies["gpu 1"] <= LIMITS.copies_per_gpu
        assert copies["disk 1"] <= LIMITS.copies_per_disk

    @invariant()
    def what_is_published_follows_the_table(self) -> None:
        by_number = {number: State(name.lower()) for name, number in _wire_states()}
        for states in self.published.values():
            for old, new in pairwise(states):
                assert old == new or by_number[new] in MOVES.get(by_number[old], ()), (by_number[old], by_number[new])

    def teardown(self) -> None:
        """Let the world continue without further trouble: everything ends."""
        try:
            if hasattr(self, "journal"):
                self.finish()
        finally:
            if hasattr(self, "journal"):
                self.crash.dead = True
                self.end_tasks()
                self.journal.close()
            self.loop.close()
            self.directory.cleanup()

    def finish(self) -> None:
        self.world.full, self.crash.after = False, 0
        for _ in range(FINISH_ROUNDS):
            if all(one.final for one in self.records()):
                break
            self.now += 1.0
            for name, shim in self.world.shims.items():
                if shim.working:
                    self.world.end(name, "succeeded", image=self.is_checkpoint(shim.working))
            self.files_are_written()
        self.nothing_is_forgotten_and_ends_stay()
        self.ends_agree_with_the_world()
        self.limits_hold()
        records = self.records()
        assert [one for one in records if not one.final] == []
        assert all(self.published[one.id] for one in records)
        ends = Counter(operation for type, _, operation in self.events.said if type.rpartition(".")[2] in FINAL)
        assert all(count == 1 for count in ends.values())


def _wire_states() -> list[tuple[str, int]]:
    return [(name, number) for name, number in agent_pb2.OperationState.items() if number]


Operations.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOperations = Operations.TestCase

"""The order in which seats wait outlives the agent: it is in the journal's operations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kybernate.agent.journal import JournalUnusable
from kybernate.agent.operations.store import Wanted
from kybernate.agent.seats.former import AT_WORK, Former, former_turns, last_move
from kybernate.seats.model import NEVER
from kybernate.verbs.model import Operation, State, Target
from kybernate.verbs.swap import Swap
from kybernate.verbs.verb import Verb
from kybernate.verbs.wake import Sleep, Wake
from tests.unit.agent.seats.fake_seats import RULES, FakeNode, until

KEY = ("k8s.io", "a")
LEFT = {AT_WORK: "true"}


def operation(verb: Verb, at: float, *, state: State = State.SUCCEEDED, **more: Any) -> Operation:
    ended = None if state is State.RUNNING else at + 1
    target = Target(more.pop("namespace", "k8s.io"), more.pop("container", "a"), other=more.pop("other", ""))
    return Operation("1", verb, target, created=at, state=state, ended=ended, **more)


SLEEP, WAKE, SWAP = Sleep("a"), Wake("a"), Swap("a", "b")


@pytest.mark.parametrize(
    ("newest_first", "found"),
    [
        ([], None),
        ([operation(SLEEP, 9, labels=LEFT), operation(WAKE, 5)], Former(False, 10, 9)),
        ([operation(SLEEP, 9), operation(WAKE, 5)], Former(False, 10)),
        ([operation(SWAP, 9, labels=LEFT, other="b")], Former(False, 10, 9)),
        ([operation(SWAP, 9, labels=LEFT, container="b", other="a")], Former(True, 10, 9)),
        ([operation(SWAP, 9, state=State.RUNNING, labels=LEFT)], Former(False, 9, 9)),
        ([operation(WAKE, 9, state=State.RUNNING), operation(SLEEP, 5, labels=LEFT)], Former(False, 6, 5)),
        ([operation(WAKE, 9, state=State.FAILED), operation(SLEEP, 5, labels=LEFT)], Former(False, 6, 5)),
        ([operation(WAKE, 9, namespace="other"), operation(SLEEP, 5, labels=LEFT)], Former(False, 6, 5)),
    ],
)
def test_last_move_of_a_container_is_in_the_journal(newest_first: list[Operation], found: Former | None) -> None:
    assert last_move(KEY, newest_first) == found


def test_journal_that_does_not_answer_leaves_the_order_to_use() -> None:
    class Unusable:
        async def list(self, wanted: Wanted) -> Sequence[Operation]:
            raise JournalUnusable("the disk is full")

    assert asyncio.run(former_turns(Unusable(), [KEY])) == {}


def test_seats_get_their_turns_in_the_order_of_the_former_run() -> None:
    async def work() -> None:
        node = FakeNode()
        names = ["a", "b", "c", "d"]
        keys = {name: node.add(name, "attached" if name == "a" else "suspended", seat=f"g0-s{place}")
                for place, name in enumerate(names)}  # fmt: skip
        former = {
            keys["a"]: Former(True, 7, 6),
            keys["b"]: Former(False, 9, asked=8),
            keys["c"]: Former(False, 9, NEVER),
            keys["d"]: Former(False, 9, asked=2),
        }
        async with node.arbitrating(RULES, former=former) as arbiter:
            await until(lambda: "attached b" in node.done)
            assert [one for one in node.done if one.startswith("attached")] == ["attached d", "attached b"]
            assert arbiter.seat_of(keys["c"]).requests == ()  # type: ignore[union-attr]

    asyncio.run(work())


def test_container_that_has_started_since_has_no_former_turn() -> None:
    async def work() -> None:
        node = FakeNode()
        key = node.add("a", seat="g0-s0")
        node.known[key].started.FromSeconds(10)
        async with node.arbitrating(RULES, former={key: Former(False, 9, asked=8)}) as arbiter:
            await until(arbiter.ready.is_set)
            assert node.status(key) == "suspended"

    asyncio.run(work())

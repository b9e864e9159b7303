"""The operations' tables: what is written comes back, a key means one operation, ended operations stay."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.operations.store import SCHEMA, Store, Wanted, decode, encode, fingerprint
from kybernate.agent.operations.submission import new_id
from kybernate.node.failure import Claimed, Exhausted, Missing
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.every import VERBS
from kybernate.verbs.model import FINAL, MOVES, Arguments, Fault, Operation, Result, State, Step, Submission, Target
from kybernate.verbs.suspend import Suspend

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal", SCHEMA)
    yield journal
    journal.close()


@pytest.fixture
def store(journal: Journal) -> Store:
    return Store(journal, VERBS)


def operation(id: str, *, state: State = State.PENDING, created: float = 1.0, writes: str = "") -> Operation:
    return Operation(
        id=id,
        arguments=Checkpoint("web", path="x"),
        target=Target(container="c1", title="default/web/main", writes=writes, holds=("container c1",)),
        created=created,
        state=state,
        ended=created if state in FINAL else None,
        fault=Fault("Broken", "it broke") if state == State.FAILED else None,
    )


def add(store: Store, one: Operation, key: str = "", **changes: Any) -> Operation:
    submission = replace(Submission(one.arguments, key=key), **changes)
    return run(store.add(one, submission, pending=100))


texts = st.text(max_size=5)
steps = st.tuples(st.builds(Step, texts, st.floats(0, 1e6), st.integers(0, 1 << 62)))


@given(
    st.sampled_from(sorted(VERBS)).flatmap(lambda verb: st.builds(VERBS[verb])),
    st.builds(Target),
    st.none() | st.builds(Result, steps=steps, arena_reasons=st.tuples(texts)),
    st.none() | st.builds(Fault),
    st.dictionaries(texts, texts, max_size=2),
    st.lists(texts, max_size=2).map(tuple),
    steps,
)
def test_record_comes_back_as_it_was(
    arguments: Arguments,
    target: Target,
    result: Result | None,
    fault: Fault | None,
    labels: dict[str, str],
    notes: tuple[str, ...],
    steps: tuple[Step, ...],
) -> None:
    one = Operation("x", arguments, target, 1.5, number=3, labels=labels, result=result, fault=fault, notes=notes)
    one = replace(one, steps=steps, cause="deadline", boot="b", attempts=2, deadline=9.5, revision=4)
    row = {name: getattr(one, name) for name in ("id", "number", "verb", "state", "created", "revision")}
    row |= {"started": None, "ended": None, "deadline": 9.5, "record": encode(one)}
    assert decode(row, VERBS) == one


def test_record_that_cannot_be_read_is_not_skipped(store: Store, journal: Journal) -> None:
    add(store, operation("a", state=State.RUNNING))
    with journal.transaction() as connection:
        connection.execute("UPDATE operations SET record = '{}'")
    with pytest.raises(JournalUnusable, match="operation a"):
        run(store.unfinished())


def test_key_means_one_operation_also_after_its_end(store: Store) -> None:
    first = add(store, operation("a"), "k")
    assert add(store, operation("b"), "k") == first
    run(store.write(replace(first, state=State.CANCELLED, ended=2.0)))
    assert add(store, operation("c"), "k").state == State.CANCELLED
    assert [one.id for one in run(store.list(Wanted()))] == ["a"]


def test_key_of_another_request_is_refused_and_of_another_scope_is_not(store: Store) -> None:
    add(store, operation("a"), "k")
    with pytest.raises(Claimed, match="operation a"):
        add(store, operation("b"), "k", labels={"x": "y"})
    assert add(store, operation("c"), "k", scope="container c1").id == "c"


def test_request_of_the_same_fields_is_the_same_whoever_asks() -> None:
    one = Submission(Suspend("a"), requester="uid 0 (pid 1)", labels={"a": "b", "c": "d"})
    assert fingerprint(one) == fingerprint(replace(one, requester="uid 0 (pid 2)", labels={"c": "d", "a": "b"}))
    assert fingerprint(one) != fingerprint(replace(one, arguments=Suspend("a", lock_timeout=1)))
    assert fingerprint(one) != fingerprint(replace(one, seconds=5))
    assert fingerprint(Submission(VERBS["verify"](image="a"))) != fingerprint(Submission(VERBS["delete"](image="a")))


def test_place_belongs_to_one_operation_until_that_ends(store: Store) -> None:
    first = add(store, operation("a", writes="/images/x"))
    with pytest.raises(Claimed, match="checkpoint a"):
        add(store, operation("b", writes="/images/x"))
    run(store.write(replace(first, state=State.CANCELLED, ended=2.0)))
    assert add(store, operation("c", writes="/images/x")).id == "c"


def test_only_so_many_operations_wait(store: Store) -> None:
    add(store, operation("a"))
    with pytest.raises(Exhausted, match=r"have not ended|more than"):
        run(store.add(operation("b"), Submission(Suspend("a")), pending=1))


@pytest.mark.parametrize("old", list(State))
@pytest.mark.parametrize("new", list(State))
def test_state_changes_as_the_table_has_it_or_not_at_all(
    store: Store, journal: Journal, old: State, new: State
) -> None:
    """The rule is the database's: the statement here bypasses everything else."""
    one = add(store, operation("a", state=old))
    ended = 2.0 if new in FINAL else None

    def change(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE operations SET state = ?, ended = ?", (new, ended))

    if new in MOVES.get(old, ()):
        run(journal.run(change))
        assert run(store.get(one.id)).state == new
    else:
        with pytest.raises(JournalUnusable, match="an operation"):
            run(journal.run(change))
        assert run(store.get(one.id)).state == old


def test_ended_operation_is_not_written_again(store: Store) -> None:
    one = add(store, operation("a"))
    run(store.write(replace(one, state=State.CANCELLED, ended=2.0)))
    with pytest.raises(Missing, match=r"there is no operation|could be changed"):
        run(store.write(replace(one, state=State.RUNNING)))


def test_list_is_newest_first_and_goes_on_before_an_operation(store: Store) -> None:
    for number in range(5):
        add(store, operation(f"op{number}"))
    assert [one.id for one in run(store.list(Wanted(limit=2)))] == ["op4", "op3"]
    assert [one.id for one in run(store.list(Wanted(limit=2, before="op3")))] == ["op2", "op1"]
    with pytest.raises(Missing, match=r"there is no operation|could be changed"):
        run(store.list(Wanted(before="op9")))


def test_list_has_operations_of_a_container_and_of_states(store: Store) -> None:
    one = add(store, operation("a"))
    add(store, replace(operation("b"), target=Target(container="c2")))
    run(store.write(replace(one, state=State.CANCELLED, ended=2.0)))
    assert [found.id for found in run(store.list(Wanted(container="default/web/main")))] == ["a"]
    assert [found.id for found in run(store.list(Wanted(states=(State.PENDING,))))] == ["b"]


def test_prune_keeps_some_operations_of_each_container(store: Store) -> None:
    """However many one container has asked for, another one's stay, and what has not ended."""
    many = [add(store, operation(f"many{number}"), f"k{number}") for number in range(30)]
    other = add(store, replace(operation("other"), target=Target(container="c2")))
    for one in [*many[:-1], other]:
        run(store.write(replace(one, state=State.FAILED, ended=100.0)))
    removed = run(store.prune(100.0, keep=5, keep_keys=50, keep_of_one=9))
    assert [one.id for one in removed] == [f"many{number}" for number in range(20)]
    left = {one.id for one in run(store.list(Wanted()))}
    assert left == {"other", *(f"many{number}" for number in range(20, 30))}
    assert run(store.find_key(Submission(Checkpoint("web", path="x"), key="k0"))) is None
    assert run(store.find_key(Submission(Checkpoint("web", path="x"), key="k20"))) is not None


def test_prune_keeps_what_runs_and_what_has_a_key(store: Store) -> None:
    old = [add(store, operation("old")), add(store, operation("keyed", created=90.0), "k")]
    add(store, operation("runs"), "other")
    for one in old:
        run(store.write(replace(one, state=State.CANCELLED, ended=one.created)))
    removed = run(store.prune(100.0, keep=5, keep_keys=50, keep_of_one=9))
    assert [one.id for one in removed] == ["old"]
    assert run(store.find_key(Submission(Checkpoint("web", path="x"), key="k"))) is not None
    assert run(store.find_key(Submission(Checkpoint("web", path="x"), key="other"))) is not None
    assert [one.id for one in run(store.prune(200.0, keep=5, keep_keys=50, keep_of_one=9))] == ["keyed"]
    assert run(store.find_key(Submission(Checkpoint("web", path="x"), key="k"))) is None


def test_full_disk_refuses_and_changes_nothing(store: Store, journal: Journal) -> None:
    add(store, operation("a"))
    with journal.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    big = replace(operation("b"), notes=("x" * 100_000,))
    with pytest.raises(JournalUnusable, match="cannot be written"):
        add(store, big)
    assert [one.id for one in run(store.unfinished())] == ["a"]


@given(st.lists(st.floats(0, 1e10), min_size=2, max_size=10))
def test_ids_rise_whatever_the_clock_does(times: list[float]) -> None:
    ids = [""]
    for now in times:
        ids.append(new_id(now, ids[-1]))
    assert ids[1:] == sorted(set(ids[1:]))

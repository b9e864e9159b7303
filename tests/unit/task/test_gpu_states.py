"""The table of GPU states, and what holds for every path through it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Busy, Refused
from kybernate_shim.task.codes import KINDS, RULES, code_of
from kybernate_shim.task.gpu_report import advice, in_one_word
from kybernate_shim.task.gpu_states import ALWAYS, BUSY, ENDS, STARTS, GpuStates
from kybernate_shim.ttrpc import Code

CALLS = sorted({call for row in STARTS.values() for call in row})
OPERATIONS = ["suspend", "resume", "checkpoint", "restore"]
OUTCOMES = sorted({outcome for row in ENDS.values() for outcome in row} | {"failed"})


def test_every_row_leads_to_a_known_state() -> None:
    assert {state for row in (*STARTS.values(), *ENDS.values()) for state in row.values()} <= set(STARTS)
    assert set(ENDS) == BUSY


@pytest.mark.parametrize("state", STARTS)
@pytest.mark.parametrize("call", ALWAYS)
def test_whatever_happens_a_container_can_be_looked_into_and_ended(state: str, call: str) -> None:
    states = GpuStates("c")
    states.state = state
    states.require(call)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("call", CALLS)
def test_second_operation_is_told_of_the_first(operation: str, call: str) -> None:
    states = GpuStates("c")
    states.begin(operation)
    with pytest.raises(Busy, match=f"cannot {call} container c now") as refused:
        states.require(call)
    assert code_of(refused.value) is Code.ABORTED


def test_stuck_container_is_resumed_first() -> None:
    states = GpuStates("c")
    states.begin("suspend")
    states.end("not back")
    with pytest.raises(Refused, match="kybernate resume c"):
        states.begin("suspend")
    states.begin("resume")
    states.end("done")
    assert states.state == "attached"


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(OUTCOMES)), max_size=30))
def test_no_path_stays_in_an_operation(path: list[tuple[str, str]]) -> None:
    states = GpuStates("c")
    for call, outcome in path:
        before = states.state
        with suppress(Refused, Busy):
            states.begin(call)
            states.end(outcome)
        assert not states.busy
        if outcome == "failed":
            assert states.state == before


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (["running", "running"], "attached"),
        (["checkpointed"], "suspended"),
        (["checkpointed", "running"], "partly suspended"),
        (["checkpointed", "locked"], "locked"),
        (["locked", "failed"], "failed"),
        (["running", "unknown"], "unknown"),
    ],
)
def test_drivers_words_become_one_with_what_to_do(states: list[str], word: str) -> None:
    assert in_one_word(states) == word
    assert bool(advice(word, "c")) is (word not in ("attached", "suspended"))


def test_every_kind_of_error_has_one_code() -> None:
    assert len(KINDS) == len(set(KINDS))
    assert len({rule.code for rule in RULES}) == len(RULES)

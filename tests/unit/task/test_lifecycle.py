"""The life-cycle table, and what holds for every path through it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Refused
from kybernate_shim.task.lifecycle import MOVES, after

VERBS = sorted({verb for row in MOVES.values() for verb in row})


@pytest.mark.parametrize("state", MOVES)
def test_every_move_leads_to_a_known_state(state: str) -> None:
    assert set(MOVES[state].values()) <= set(MOVES)


@pytest.mark.parametrize(
    ("state", "verb"),
    [
        ("running", "delete"),  # clients rely on an error here, not on a kill
        ("paused", "delete"),
        ("paused", "exec"),
        ("stopped", "start"),
        ("created", "checkpoint"),
        ("restorable", "exec"),
        ("deleted", "start"),
    ],
)
def test_forbidden_move_names_verb_and_state(state: str, verb: str) -> None:
    with pytest.raises(Refused, match=f"cannot {verb} a {state} container"):
        after(state, verb)


@given(st.lists(st.sampled_from(VERBS), max_size=40))
def test_an_exit_happens_at_most_once_and_a_deleted_container_stays_deleted(verbs: list[str]) -> None:
    state, exits = "created", 0
    for verb in verbs:
        try:
            following = after(state, verb)
        except Refused:
            continue
        assert state != "deleted"
        exits += verb == "exit"
        state = following
    assert exits <= 1


@pytest.mark.parametrize("state", ["created", "restorable", "running", "pausing", "paused"])
def test_whatever_lives_can_end(state: str) -> None:
    assert after(state, "exit") == "stopped"

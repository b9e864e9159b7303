"""The pauses between attempts of the policy at the same thing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.keeping.keeper import Attempts


def times(attempts: Attempts, until: float, every: float = 10.0) -> list[float]:
    """Return when attempts begin, asked as often as the policy decides."""
    begun, now = [], 0.0
    while now <= until:
        if attempts.is_due("copy", now):
            attempts.begin("copy", now)
            begun.append(now)
        now += every
    return begun


def test_pauses_become_longer() -> None:
    assert times(Attempts(), 5000) == [0, 300, 900, 2100, 4500]


def test_pauses_have_an_end() -> None:
    begun = times(Attempts(), 7 * 86400, 60)
    assert begun[-1] - begun[-2] == 6 * 3600


def test_attempt_after_a_long_rest_is_a_first_one() -> None:
    attempts = Attempts()
    assert [attempts.begin("copy", now) for now in (0, 300)] == [0, 1]
    assert attempts.begin("copy", 300 + 2 * 600) == 0
    assert attempts.is_due("copy", 300 + 2 * 600 + 300)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1e6)), max_size=50))
def test_one_subject_does_not_delay_another(calls: list[tuple[int, float]]) -> None:
    together, alone = Attempts(), Attempts()
    for subject, now in sorted(calls, key=lambda call: call[1]):
        due = together.is_due(subject, now)
        if due:
            together.begin(subject, now)
        if subject == 0:
            assert due == alone.is_due(0, now)
            if due:
                alone.begin(0, now)

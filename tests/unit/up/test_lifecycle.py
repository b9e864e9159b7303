"""A model comes from nothing to ready, from its template after an end, and never starts in a tight loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.up.lifecycle import BACKOFF, STEADY_SECONDS, Done, Next, Seen, Step, decide, failures_after

READY = Seen(image=True, pod=True, same=True, running=True, started=10.0, template=True)
SETTLED = Done(healthy=True, warmed=True, settled=True)


@pytest.mark.parametrize(
    ("seen", "done", "step"),
    [
        (Seen(), Done(), Step.PULL),
        (Seen(image=True), Done(), Step.START),
        (Seen(image=True, template=True), Done(), Step.RESTORE),
        (Seen(image=True, template=True), Done(template_failed=True), Step.START),
        (Seen(image=True, template=True), Done(stale=True), Step.START),
        (READY, Done(healthy=True, stale=True), Step.WARM),
        (READY, Done(healthy=True, warmed=True, stale=True), Step.TEMPLATE),
        (READY, Done(parked=True), Step.REMOVE),
        (Seen(), Done(parked=True), Step.PARKED),
        (replace(READY, same=False), SETTLED, Step.REMOVE),
        (replace(READY, running=False), SETTLED, Step.REMOVE),
        (replace(READY, template=False), Done(), Step.AWAIT),
        (replace(READY, template=False), Done(healthy=True), Step.WARM),
        (replace(READY, template=False), Done(healthy=True, warmed=True), Step.TEMPLATE),
        (replace(READY, template=False), Done(healthy=True, warmed=True, template_failed=True), Step.SLEEP),
        (READY, Done(healthy=True), Step.SLEEP),  # out of a template it is warm
        (READY, SETTLED, Step.NONE),
    ],
)
def test_next_step(seen: Seen, done: Done, step: Step) -> None:
    assert decide(seen, done, 100.0, warm_up=True, template=True).step is step


def test_without_warm_up_and_template_a_healthy_program_is_suspended() -> None:
    seen = replace(READY, template=False)
    assert decide(seen, Done(healthy=True), 0.0, warm_up=False, template=False).step is Step.SLEEP


@given(st.integers(1, 20), st.floats(0, 1000), st.floats(0, 1000))
def test_program_that_ends_is_started_again_after_its_pause(failures: int, ended: float, later: float) -> None:
    seen = Seen(image=True, ended=ended)
    found = decide(seen, Done(failures=failures), ended + later, warm_up=False, template=False)
    pause = BACKOFF[min(failures, len(BACKOFF) - 1)]
    if found.step is Step.WAIT:
        assert 0 < found.seconds <= pause
    else:
        assert found == Next(Step.START)
        assert ended + later >= ended + pause or later == pytest.approx(pause)


def test_failures_are_counted_in_a_row() -> None:
    assert failures_after(Done(healthy=True, failures=3), 0.0, STEADY_SECONDS) == 1
    assert failures_after(Done(healthy=True, failures=3), 0.0, STEADY_SECONDS - 1) == 4
    assert failures_after(Done(failures=0), 0.0, 1000.0) == 1


@given(st.builds(Seen, *[st.booleans()] * 4), st.builds(Done, *[st.booleans()] * 3), st.booleans(), st.booleans())
def test_each_step_is_of_what_is_there(seen: Seen, done: Done, warm_up: bool, template: bool) -> None:
    step = decide(seen, done, 0.0, warm_up=warm_up, template=template).step
    if step in (Step.START, Step.RESTORE):
        assert seen.image
        assert not seen.pod
    if step in (Step.AWAIT, Step.WARM, Step.TEMPLATE, Step.SLEEP, Step.NONE):
        assert seen.pod
        assert seen.running
        assert seen.same

"""A model comes from nothing to ready, from its template after an end, and never starts in a tight loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.up.lifecycle import (
    BACKOFF,
    RESTORES_UNEXPLAINED,
    STEADY_SECONDS,
    Cause,
    Done,
    Next,
    Seen,
    Step,
    after_failed_restore,
    cause_of,
    decide,
    failures_after,
)
from kybernate_shim.gpu.gpu_map import GpuMismatch, GpuPlan, require_room
from kybernate_shim.gpu.helper_answers import NodeGpu

GPU = NodeGpu("GPU-1", "H200", 3 << 30, 1 << 30, mig=False)

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


def no_room() -> str:
    with pytest.raises(GpuMismatch) as refused:
        require_room(GpuPlan((), {"GPU-1": 2 << 30}), [GPU])
    return f'containerd: failed to start containerd task "x": restore failed: {refused.value}: unknown'


@pytest.mark.parametrize(
    ("said", "facts", "cause"),
    [
        (no_room(), {}, Cause.ROOM),
        (no_room(), {"before": 9, "damaged": True}, Cause.ROOM),
        ("CUDA_ERROR_OUT_OF_MEMORY", {}, Cause.ROOM),
        ("any words", {"short": True, "before": 9}, Cause.ROOM),
        ("any words", {"away": True, "before": 9}, Cause.AWAY),
        ("kybernate.io/restore-from: the node's agent: it is stopping. Nothing was restored", {}, Cause.AWAY),
        ("any words", {}, Cause.UNKNOWN),
        ("any words", {"before": RESTORES_UNEXPLAINED - 1}, Cause.TEMPLATE),
        ("any words", {"damaged": True}, Cause.TEMPLATE),
        ("GPU GPU-1 is a H100, the image needs a H200. Nothing was restored: failed precondition", {}, Cause.UNKNOWN),
    ],
)
def test_cause_of_a_failed_restore(said: str, facts: dict[str, int], cause: Cause) -> None:
    assert cause_of(said, **facts) is cause  # type: ignore[arg-type]


@given(st.lists(st.sampled_from([Cause.ROOM, Cause.AWAY]), min_size=1, max_size=20))
def test_template_is_never_given_up_for_what_passes(causes: list[Cause]) -> None:
    done = Done()
    for cause in causes:
        done = after_failed_restore(done, cause)
    assert not done.stale
    assert done.failures == len(causes)  # it backs off
    seen = Seen(image=True, template=True, ended=10.0)
    assert decide(seen, done, 10.0, warm_up=True, template=True).step is Step.WAIT
    assert decide(seen, done, 10.0 + BACKOFF[-1], warm_up=True, template=True).step is Step.RESTORE
    assert after_failed_restore(done, Cause.TEMPLATE).stale

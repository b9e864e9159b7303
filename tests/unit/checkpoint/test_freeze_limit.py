"""How long a container may be frozen: what says so, what is expected, and what happens when the time is over."""

from __future__ import annotations

import asyncio

import pytest

from kybernate_shim.checkpoint.freeze_limit import (
    ANNOTATION,
    ANY,
    Expected,
    FreezeLimit,
    Standstill,
    limit_of,
    seconds_of,
)
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.oci.spec import Spec


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2), ("500ms", 0.5), ("1.5", 1.5), ("2 s", 2), ("1m", 60), ("none", ANY), ("0.25s", 0.25)],
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-1s", "2h", "s", "inf", "nan", "1e3", "2s ", "1_0s", "٣s", "9" * 400, "0.0000s"]
)
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="a time above 0"):
        seconds_of(text)


def spec(value: str = "") -> Spec:
    return Spec({"annotations": {ANNOTATION: value}} if value else {})


def test_request_comes_before_annotation_and_node() -> None:
    config = Config(max_freeze=9)
    assert limit_of(3, "", spec("2s"), config) == FreezeLimit(3, "the request")
    assert limit_of(3, "the liveness probe", spec("2s"), config) == FreezeLimit(3, "the liveness probe")
    assert limit_of(0, "", spec("2s"), config) == FreezeLimit(2, f"the annotation {ANNOTATION}")
    assert limit_of(0, "", spec(), config) == FreezeLimit(9, "`max_freeze` of the node")
    assert not limit_of(0, "", spec(), Config()).is_set
    assert not limit_of(ANY, "", spec("2s"), config).is_set
    assert not limit_of(0, "", spec("none"), config).is_set


def test_annotation_that_pods_may_not_use_does_not_count() -> None:
    assert not limit_of(0, "", spec("2s"), Config(annotations=())).is_set


def test_annotation_without_a_time_is_refused() -> None:
    with pytest.raises(Refused, match=r"max-freeze has no valid time: expected a time above 0.*Nothing was changed"):
        limit_of(0, "", spec("fast"), Config())


def test_what_cannot_fit_is_refused_with_its_figures_and_what_to_do() -> None:
    limit = FreezeLimit(2, "the request")
    Expected(1 << 30, 1e9, in_memory=False).require("c", limit)
    with pytest.raises(
        Refused, match=r"There is no image, and it continues as before|a checkpoint would freeze container"
    ) as caught:
        Expected(3 << 30, 256 << 20, in_memory=False).require("c", limit)
    assert "at least 12.0 s (3072 MiB at 256 MiB/s), longer than the 2 s that the request allows" in str(caught.value)
    assert "dump_memory" in str(caught.value)
    with pytest.raises(Refused, match="stays frozen until its image is on the disk"):
        Expected(3 << 30, 256 << 20, in_memory=False, exits=True).require("c", limit)
    with pytest.raises(Refused, match="less memory"):
        Expected(8 << 30, 1e9, in_memory=True).require("c", limit)


def _still(operation: Operation, seconds: float = ANY) -> Standstill:
    still = Standstill("c", operation)
    still.allow(FreezeLimit(seconds, "the request"), "Allow more.")
    return still


def test_work_that_takes_too_long_is_ended_and_the_error_says_how_long_it_was() -> None:
    operation, undone = Operation("checkpoint"), []

    async def work() -> None:
        async with _still(operation, 0.01) as still:
            try:
                still.begin()
                await asyncio.Event().wait()
            finally:
                still.end()
                undone.append(operation.frozen_ms)

    with pytest.raises(Refused, match=r"was undone: it had been frozen for 0\.\d\d s, longer than the 0.01 s"):
        asyncio.run(work())
    assert undone == [operation.frozen_ms] != [0]
    assert operation.fields["frozen_ms"] == operation.frozen_ms


def test_time_before_and_after_the_freeze_does_not_count() -> None:
    operation = Operation("checkpoint")

    async def work() -> None:
        async with _still(operation, 0.05) as still:
            await asyncio.sleep(0.1)
            still.begin()
            still.end()
            frozen = operation.frozen_ms
            await asyncio.sleep(0.1)
            assert (still.milliseconds, operation.frozen_ms) == (frozen, frozen)

    asyncio.run(work())


def test_clock_that_is_stopped_ends_nothing_but_can_be_asked() -> None:
    async def work() -> None:
        async with _still(Operation("checkpoint"), 0.01) as still:
            still.begin()
            still.stop_clock()
            await asyncio.sleep(0.03)
            with pytest.raises(Refused, match=r"longer than the 0\.01 s that the request allows\. Allow more\."):
                still.require()

    asyncio.run(work())


def test_cancel_and_other_errors_are_not_taken_for_a_long_freeze() -> None:
    async def fail(error: BaseException) -> None:
        async with _still(Operation("checkpoint"), 60) as still:
            still.begin()
            raise error

    for error in (asyncio.CancelledError(), TimeoutError("of another clock"), OSError("disk")):
        with pytest.raises(type(error)):
            asyncio.run(fail(error))

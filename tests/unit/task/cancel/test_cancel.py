"""A cancel undoes what runs and reports what is true then; no call disturbs the undo."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.dump import DumpRequest
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack
from kybernate_shim.errors import Failed
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code
from tests.unit.clocks import pass_time
from tests.unit.task.cancel.cancelling import Shim, Tell, assert_free, failure_of
from tests.unit.task.runtime import settled


def test_cancelled_checkpoint_is_undone_and_both_callers_are_told(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        checkpoint = shim.checkpoint()
        await shim.until("work")
        shim.dumping.undo.set()
        reply = await shim.cancel()
        assert (reply.ended.operation, reply.ended.verb, reply.ended.outcome) == ("x", "checkpoint", "cancelled")
        assert (reply.ended.code, reply.ended.state) == ("CANCELED", "container c1 is running")
        assert [step.name for step in reply.ended.steps] == ["dump"]
        assert (reply.container.state, reply.container.phase) == ("running", "")
        assert (reply.container.last.operation, reply.container.last.error) == ("x", reply.ended.error)
        error = await failure_of(checkpoint)
        assert error.code is Code.CANCELED
        assert "was cancelled by" in error.message
        assert "there is no image, and the container is as before" in error.message
        assert shim.dumping.steps == ["work", "undo", "undone"]
        await assert_free(shim)

    tell(story)


def test_second_cancel_waits_for_the_same_undo(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        checkpoint = shim.checkpoint()
        await shim.until("work")
        first = shim.cancel()
        await shim.until("undo")
        others = [shim.cancel(), shim.cancel("")]
        await settled()
        assert (await shim.status()).cancelling
        assert not any(one.done() for one in (first, *others))
        shim.dumping.undo.set()
        assert {(await one).ended.outcome for one in (first, *others)} == {"cancelled"}
        assert (await shim.cancel()).ended.outcome == "cancelled"
        assert (await failure_of(checkpoint)).code is Code.CANCELED
        assert shim.dumping.steps == ["work", "undo", "undone"]

    tell(story)


def test_deadline_does_not_disturb_the_undo(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        shim.dumping.seconds = 5
        checkpoint = shim.checkpoint()
        await shim.until("work")
        cancel = shim.cancel()
        await shim.until("undo")
        await pass_time(5)
        shim.dumping.undo.set()
        assert (await cancel).ended.outcome == "cancelled"
        assert (await failure_of(checkpoint)).code is Code.CANCELED
        assert shim.dumping.steps == ["work", "undo", "undone"]

    tell(story)


def test_cancel_does_not_disturb_the_undo_of_a_deadline(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        shim.dumping.seconds = 0.01
        checkpoint = shim.checkpoint()
        await shim.until("undo")
        cancel = shim.cancel()
        await settled()
        shim.dumping.undo.set()
        assert (await cancel).ended.outcome == "failed"
        assert (await failure_of(checkpoint)).code is Code.DEADLINE_EXCEEDED
        assert shim.dumping.steps == ["work", "undo", "undone"]

    tell(story)


def test_what_cannot_be_stopped_any_more_completes(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        shim.dumping.commits, shim.dumping.seconds = True, 5
        shim.dumping.work.set()
        checkpoint = shim.checkpoint()
        await shim.until("committed")
        cancel = shim.cancel()
        await pass_time(5)
        assert not cancel.done()
        shim.dumping.end.set()
        reply = await cancel
        assert (reply.ended.outcome, reply.ended.bytes) == ("succeeded", 4711)
        assert (reply.ended.path, reply.ended.manifest_digest) == ("/image", "sha256:0")
        assert (await checkpoint).bytes == 4711
        assert (await failure_of(shim.cancel())).code is Code.FAILED_PRECONDITION

    tell(story)


def test_kill_goes_on_during_the_undo_and_ends_what_stays_frozen(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        checkpoint = shim.checkpoint()
        await shim.until("work")
        cancel = shim.cancel()
        await shim.until("undo")
        await shim.container.kill("", 9, all=False)
        assert "kill 9" in shim.life.runtime.calls
        assert not cancel.done()
        shim.dumping.undo.set()
        assert (await cancel).ended.outcome == "failed"
        error = await failure_of(checkpoint)
        assert error.code is Code.ABORTED
        assert "it was killed" in error.message
        assert shim.killed.read_text()
        assert shim.dumping.steps == ["work", "undo", "undone"]

    tell(story)


def test_cancel_kills_nothing(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        checkpoint = shim.checkpoint()
        await shim.until("work")
        shim.dumping.undo.set()
        await shim.cancel()
        await failure_of(checkpoint)
        assert not shim.killed.read_text()
        assert not [call for call in shim.life.runtime.calls if call.startswith("kill")]

    tell(story)


def test_what_could_not_be_undone_is_in_the_answer(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        shim.dumping.undo_failure = OSError("the freezer does not answer")
        checkpoint = shim.checkpoint()
        await shim.until("work")
        shim.dumping.undo.set()
        reply = await shim.cancel()
        assert "not undone: the freezer does not answer" in reply.ended.error
        assert (await failure_of(checkpoint)).message == reply.ended.error

    tell(story)


def test_processes_that_do_not_come_back_are_a_failure_not_a_cancel(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        async def dump(target: Any, request: Any, operation: Operation, *_: Any) -> Any:
            try:
                shim.dumping.steps.append("work")
                await shim.dumping.work.wait()
            except asyncio.CancelledError as error:
                raise NotBack("process 7 is checkpointed") from error

        shim.dumping.dump = dump  # type: ignore[method-assign]
        checkpoint = shim.checkpoint()
        await shim.until("work")
        reply = await shim.cancel()
        assert (reply.ended.outcome, reply.ended.code) == ("failed", "INTERNAL")
        assert "process 7 is checkpointed" in reply.ended.error
        assert (await failure_of(checkpoint)).code is Code.INTERNAL

    tell(story)


def test_failure_before_the_cancel_is_not_hidden_by_it(tell: Tell) -> None:
    """The undo of a failure is stopped by nothing; here is one that lets itself be."""

    async def story(shim: Shim) -> None:
        shim.dumping.failure = Failed("CRIU said no")
        shim.dumping.work.set()
        checkpoint = shim.checkpoint()
        await shim.until("undo")
        reply = await shim.cancel()
        assert "CRIU said no" in reply.ended.error
        assert "CRIU said no" in (await failure_of(checkpoint)).message

    tell(story)


def test_operation_before_its_first_step_can_be_cancelled(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        checkpoint = shim.checkpoint()
        while shim.container.operation is None:  # noqa: ASYNC110  # and not a step later
            await asyncio.sleep(0)
        reply = await shim.cancel()
        assert reply.ended.outcome == "cancelled"
        assert (await failure_of(checkpoint)).code is Code.CANCELED
        await assert_free(shim)

    tell(story)


def test_request_that_waits_behind_another_call_can_be_cancelled(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        async with shim.container.lock:
            checkpoint = shim.checkpoint()
            await settled()
            assert (await shim.status()).operation == "x"
            reply = await shim.cancel()
            assert (reply.ended.operation, reply.ended.outcome) == ("x", "cancelled")
        assert (await failure_of(checkpoint)).code is Code.CANCELED
        assert shim.dumping.steps == []
        await assert_free(shim)

    tell(story)


def test_containerds_own_checkpoint_can_be_cancelled_without_a_name(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        request = DumpRequest(Path("/image"), Path("/work"))
        checkpoint = asyncio.ensure_future(shim.container.checkpoint(request))
        await shim.until("work")
        assert (await failure_of(shim.cancel("x"))).code is Code.NOT_FOUND
        shim.dumping.undo.set()
        assert (await shim.cancel("")).ended.outcome == "cancelled"
        with pytest.raises(Exception, match="was cancelled by"):
            await checkpoint

    tell(story)


@pytest.mark.parametrize(("operation", "code"), [("", Code.FAILED_PRECONDITION), ("x", Code.NOT_FOUND)])
def test_cancel_of_nothing(tell: Tell, operation: str, code: Code) -> None:
    async def story(shim: Shim) -> None:
        assert (await failure_of(shim.cancel(operation))).code is code
        unknown = shim.call("Cancel", wire.CancelRequest(id="nowhere"))
        assert (await failure_of(unknown)).code is Code.NOT_FOUND

    tell(story)


@pytest.mark.parametrize("method", ["Checkpoint", "Suspend", "Resume", "Cancel"])
def test_odd_name_is_an_invalid_argument(tell: Tell, method: str) -> None:
    async def story(shim: Shim) -> None:
        kind = getattr(wire, f"{method}Request")
        more = {"path": "/image"} if method == "Checkpoint" else {}
        error = await failure_of(shim.call(method, kind(id="c1", operation="../x", **more)))
        assert error.code is Code.INVALID_ARGUMENT
        assert shim.dumping.steps == []

    tell(story)

"""What a shim reports of operations that run or have ended."""

from __future__ import annotations

from kybernate_shim.errors import Failed
from kybernate_shim.ttrpc import Code
from tests.unit.task.cancel.cancelling import Shim, Tell, assert_free, failure_of
from tests.unit.task.runtime import settled


def test_status_names_what_runs_and_what_has_ended(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        before = await shim.status()
        assert not before.HasField("last")
        checkpoint = shim.checkpoint()
        await shim.until("work")
        now = await shim.status()
        assert (now.operation, now.phase, now.step, now.cancelling) == ("x", "checkpoint", "dump", False)
        shim.dumping.work.set()
        await checkpoint
        shim.dumping.failure = Failed("CRIU said no")
        shim.dumping.undo.set()
        await failure_of(shim.checkpoint("y"))
        after = await shim.status()
        assert (after.operation, after.phase) == ("", "")
        assert (after.last.operation, after.last.outcome, after.last.code) == ("y", "failed", "INTERNAL")
        assert (after.last.error, after.last.path) == ("CRIU said no", "")
        (earlier,) = after.earlier
        assert (earlier.operation, earlier.outcome, earlier.bytes, earlier.error) == ("x", "succeeded", 4711, "")
        assert earlier.seconds_ago >= after.last.seconds_ago

    tell(story)


def test_repeated_request_is_the_same_checkpoint(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        first = shim.checkpoint()
        await shim.until("work")
        second = shim.checkpoint(timeout_seconds=3)
        await settled()
        assert (await failure_of(shim.checkpoint("y"))).code is Code.ABORTED
        assert (await failure_of(shim.checkpoint("x", exit=True))).code is Code.ALREADY_EXISTS
        shim.dumping.work.set()
        assert await first == await second
        assert await shim.checkpoint() == await first
        assert shim.dumping.steps == ["work"]

    tell(story)


def test_disk_that_is_full_for_the_note_leaves_nothing_running(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        def full(phase: str) -> None:
            raise OSError(28, "No space left on device")

        cleanup = shim.container.cleanup
        note, cleanup.record_phase = cleanup.record_phase, full  # type: ignore[method-assign]
        assert "No space left" in (await failure_of(shim.checkpoint())).message
        cleanup.record_phase = note  # type: ignore[method-assign]
        assert shim.dumping.steps == []
        await assert_free(shim)

    tell(story)

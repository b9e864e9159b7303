"""What can be done with a container that a checkpoint has left frozen: it is released, or it ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate_shim.checkpoint.dump_request import DumpRequest
from kybernate_shim.checkpoint.hold import ENDING, FrozenHold
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack
from kybernate_shim.linux.children import Exit
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task.service import STATUS
from kybernate_shim.ttrpc import Code
from tests.unit.task.cancel.cancelling import Shim, Tell, assert_free, eventually, failure_of
from tests.unit.task.runtime import INIT


class HeldDump:
    """A dump that is complete immediately, and whose container is held as `kybernate_shim.checkpoint.dump` does it."""

    def __init__(self, shim: Shim, failure: Exception | None = None) -> None:
        self.steps: list[str] = []
        self._shim, self._failure = shim, failure

    async def dump(
        self, target: Any, request: DumpRequest, operation: Operation, log: Any, gpus: Any, hold: FrozenHold
    ) -> Any:
        dumped = SimpleNamespace(manifest=SimpleNamespace(bytes=4711, steps=()), digest="sha256:0")
        operation.commit()
        how = await hold.until_over(dumped)  # type: ignore[arg-type]
        self.steps.append(how)
        if how == "ended":
            target.cgroup.kill()
        if self._failure is not None:
            raise self._failure
        return dumped


async def held(shim: Shim, failure: Exception | None = None, **fields: Any) -> wire.CheckpointResponse:
    shim.dumping = HeldDump(shim, failure)  # type: ignore[assignment]
    reply: wire.CheckpointResponse = await shim.checkpoint("held", hold=True, **{"hold_seconds": 60.0, **fields})
    return reply


def release(shim: Shim) -> asyncio.Task[Any]:
    return shim.call("Release", wire.ReleaseRequest(id="c1"))


def test_held_container_is_shown_and_released(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        reply = await held(shim)
        assert 59 < reply.held_seconds <= 60
        status = await shim.status()
        assert (status.state, status.phase) == ("held", "")
        assert 59 < status.held_seconds <= 60
        assert STATUS["held"] == STATUS["running"]  # for containerd, which restores no paused containers
        first, second = release(shim), release(shim)  # side by side
        assert ((await first).container.state, (await second).container.state) == ("running", "running")
        assert (await shim.status()).held_seconds == 0
        error = await failure_of(release(shim))
        assert error.code is Code.FAILED_PRECONDITION
        assert "is not held" in error.message
        await assert_free(shim)

    tell(story)


def test_deadline_releases_it(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        reply = await held(shim, hold_seconds=0.02)
        assert reply.held_seconds > 0
        await eventually(lambda: shim.container.init.state == "running")
        assert shim.dumping.steps == ["expired"]
        await assert_free(shim)

    tell(story)


def test_same_request_again_has_the_same_answer(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        assert await held(shim) == await shim.checkpoint("held", hold=True, hold_seconds=60.0)
        assert shim.container.init.state == "held"
        await release(shim)

    tell(story)


@pytest.mark.parametrize("signal", sorted(ENDING))
def test_signal_that_ends_it_kills_it_without_a_thaw(tell: Tell, signal: int) -> None:
    async def story(shim: Shim) -> None:
        await held(shim)
        await shim.container.kill("", signal, all=False)
        assert shim.dumping.steps == ["ended"]
        assert shim.killed.read_text() == "1"
        assert shim.container.init.state == "held"  # until its exit comes
        shim.container.exits.handle_init(Exit(INIT, 137, 0))
        assert shim.container.init.state == "stopped"

    tell(story)


def test_end_by_other_hands_ends_the_hold(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        await held(shim)
        shim.container.exits.handle_init(Exit(INIT, 137, 0))
        await eventually(lambda: shim.dumping.steps == ["ended"])
        await eventually(lambda: shim.container.held_seconds == 0)
        error = await failure_of(release(shim))
        assert "is not held" in error.message

    tell(story)


def test_other_calls_are_refused_with_the_remedy(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        await held(shim)
        for call in (
            shim.checkpoint("again", hold=True),
            shim.checkpoint("another"),
            shim.call("Suspend", wire.SuspendRequest(id="c1", operation="s")),
            asyncio.ensure_future(shim.container.pausing.pause()),
        ):
            with pytest.raises(Exception, match=r"a held container; `kybernate release` lets it run on"):
                await call
        assert shim.container.init.state == "held"
        assert not shim.container.lock.locked()
        await release(shim)

    tell(story)


@pytest.mark.parametrize(
    "fields", [{"exit": True}, {"tcp": "established"}, {"hold_seconds": 86401.0}, {"hold_seconds": -1.0}]
)
def test_hold_that_makes_no_sense_is_refused(tell: Tell, fields: dict[str, Any]) -> None:
    async def story(shim: Shim) -> None:
        error = await failure_of(shim.checkpoint("x", hold=True, **fields))
        assert error.code is Code.INVALID_ARGUMENT
        assert "hold" in error.message
        await assert_free(shim)

    tell(story)


def test_paused_container_is_not_held(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        shim.container.init.state = "paused"
        error = await failure_of(shim.checkpoint("x", hold=True))
        assert "cannot hold a paused container" in error.message

    tell(story)


def test_release_reports_gpus_that_do_not_come_back(tell: Tell) -> None:
    async def story(shim: Shim) -> None:
        await held(shim, NotBack("the GPU is full"))
        error = await failure_of(release(shim))
        assert "the GPU is full" in error.message
        assert shim.container.init.state == "running"

    tell(story)


def test_held_container_is_in_the_audit_log(tell: Tell, tmp_path: Path) -> None:
    async def story(shim: Shim) -> None:
        log = tmp_path / "audit.jsonl"
        shim.container.config = replace(shim.container.config, audit_log=log)
        await held(shim)
        await release(shim)
        assert [json.loads(line)["verb"] for line in log.read_text().splitlines()] == ["checkpoint", "release"]

    tell(story)

"""A container that stays frozen after its dump, until it is released, ended, or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kybernate_shim.checkpoint.dump import dump
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.hold import FrozenHold, Over
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import NotBack
from tests.unit.checkpoint.dump.dumping import AWAKE
from tests.unit.checkpoint.fake_target import LOG, FakeAccelerator, FakeTarget

Then = Callable[[FrozenHold], Awaitable[None]]


def held(
    target: FakeTarget, then: Then, accelerator: FakeAccelerator | None = None, *, seconds: float = 60
) -> tuple[Dumped, Operation]:
    """Dump with a hold, and do `then` when it has begun."""

    async def story() -> tuple[Dumped, Operation]:
        hold, operation = FrozenHold(seconds), Operation("checkpoint")
        assert hold.seconds_left == 0
        request = DumpRequest(target.image, target.work, hold=seconds)
        dumping = asyncio.ensure_future(dump(cast(Any, target), request, operation, LOG, accelerator, hold))
        await asyncio.wait({dumping, hold.begun}, return_when=asyncio.FIRST_COMPLETED)
        assert hold.begun.done()
        assert target.cgroup.frozen
        assert target.cgroup.exists
        assert (target.image / NAME).exists()  # complete, while it is frozen
        assert operation.stoppable == "never"
        await then(hold)
        done = await dumping
        assert hold.seconds_left == 0
        return done, operation

    return asyncio.run(story())


def ends(how: Over) -> Then:
    async def then(hold: FrozenHold) -> None:
        assert 0 < hold.seconds_left <= 60
        hold.finish(how)
        hold.finish("released")  # the first counts

    return then


async def nothing(hold: FrozenHold) -> None:
    """Leave it to the deadline."""


def test_released_container_runs_on(target: FakeTarget) -> None:
    dumped, operation = held(target, ends("released"))
    assert dumped.manifest.files
    assert not target.cgroup.frozen
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert operation.frozen_ms >= 0


def test_deadline_lets_it_run_on(target: FakeTarget) -> None:
    held(target, nothing, seconds=0.01)
    assert target.steps == ["freeze", "checkpoint", "thaw"]


def test_ended_container_does_nothing_after_its_image(target: FakeTarget) -> None:
    held(target, ends("ended"))
    assert target.steps == ["freeze", "checkpoint", "kill with an image"]


def test_gpus_are_free_meanwhile_and_come_back_with_the_release(target: FakeTarget) -> None:
    accelerator = FakeAccelerator(target.steps)

    async def then(hold: FrozenHold) -> None:
        assert not {"bytes back", "attach"} & set(target.steps)
        hold.finish("released")

    held(target, then, accelerator)
    assert target.steps[-len(AWAKE) :] == AWAKE


def test_ended_container_does_not_come_back_to_its_gpus(target: FakeTarget) -> None:
    held(target, ends("ended"), FakeAccelerator(target.steps))
    assert target.steps[-2:] == ["kill with an image", "forget"]


def test_image_stays_where_the_gpus_do_not_come_back(target: FakeTarget) -> None:
    class Lost(FakeAccelerator):
        def detached(self, *arguments: Any, **options: Any) -> Any:
            inner = super().detached(*arguments, **options)

            class Failing:
                async def __aenter__(self) -> Any:
                    return await inner.__aenter__()

                async def __aexit__(self, *error: Any) -> None:
                    await inner.__aexit__(*error)
                    raise NotBack("the GPU is full")

            return Failing()

    with pytest.raises(NotBack, match="the GPU is full"):
        held(target, ends("released"), Lost(target.steps))
    assert (target.image / NAME).exists()
    assert not target.cgroup.frozen


def test_daemon_that_ends_lets_it_run_on_and_keeps_the_image(target: FakeTarget) -> None:
    async def story() -> None:
        hold = FrozenHold(60)
        request = DumpRequest(target.image, target.work, hold=60)
        dumping = asyncio.ensure_future(
            dump(cast(Any, target), request, Operation("checkpoint"), LOG, FakeAccelerator(target.steps), hold)
        )
        await hold.begun
        dumping.cancel()
        await asyncio.wait({dumping})

    asyncio.run(story())
    assert not target.cgroup.frozen
    assert target.steps[-len(AWAKE) :] == AWAKE
    assert (target.image / NAME).exists()

"""What is left of the image and of the program when a part of a driven offload fails."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu import vram
from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux.process_memory import read_maps
from kybernate_shim.vram_io.errors import NotTakenAway, RegionChanged
from tests.contract.vram_driven.driving import (
    MIB,
    SIZE,
    mapping,
    open_image_files,
    run,
    watched,
    worker,
)
from tests.fakes.actor import Actor, eventually

pytestmark = pytest.mark.root


def test_failed_checkpoint_leaves_the_driver_its_bytes(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        with pytest.raises(RuntimeError, match="driver"):
            async with watched(way, program, image):
                raise RuntimeError("the driver failed")
        for file in image.iterdir():
            file.unlink()  # as the whole image is, then
        content = program.digest("vram")
        program.region("same", SIZE)
        program.fill("same", 0, SIZE)
        assert program.digest("same") == content

    run(body)
    assert program.computes()
    assert open_image_files(program, image) == set()


@pytest.mark.parametrize("change", ["maps['vram'].resize(4 << 20)", "maps['vram'].close()"], ids=["shrunk", "unmapped"])
def test_mapping_that_has_changed_fails_the_checkpoint_alone(program: Actor, image: Path, change: str) -> None:
    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            pass
        program.ask(change)
        with pytest.raises(RegionChanged):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_worker_that_is_killed_while_the_driver_works_costs_the_fast_way(program: Actor, image: Path) -> None:
    """The driver has its mapping by then; the process gets memory of its own, which CRIU can dump."""

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            worker().kill()
            content = program.digest("vram")
        assert way.data_path.name == "plain"
        assert "ended with" in way.data_path.why
        assert open_image_files(program, image) == set()
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content
            assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_worker_that_is_killed_before_the_driver_works_leaves_nothing(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image):
            one = worker()
            one.kill()
            assert await asyncio.to_thread(eventually, lambda: not one.is_running())
            program.region("vram", SIZE)
        assert way.data_path.name == "plain"
        assert (open_image_files(program, image), list(image.iterdir())) == (set(), [])
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous

    run(body)
    assert program.computes()


def test_mapping_that_has_changed_without_a_worker_fails_the_checkpoint_alone(program: Actor, image: Path) -> None:
    """Nothing was taken from the process: that its own memory is another now is no loss of ours."""

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            worker().kill()
        program.ask("maps['vram'].close()")
        with pytest.raises(NotTakenAway, match="changed what its driver had mapped"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")

    run(body)
    assert program.computes()


def test_driver_that_takes_too_long_costs_the_fast_way(
    program: Actor, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is complete when the driver is done, although no worker watches any more."""
    monkeypatch.setattr(vram, "HOLD_SECONDS", 0.5)

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            assert mapping(program).perms == "rw-s"
            assert eventually(program.computes)
            program.fill("vram", MIB, 2 * MIB, seed=3)
            content = program.digest("vram")
        assert "took longer" in way.data_path.why
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content
            assert list(image.iterdir()) == []

    run(body)
    assert open_image_files(program, image) == set()


def test_cancelled_watch_leaves_nothing(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async def watch() -> None:
            async with way.watching([program.pid], image=image):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(watch())
        assert await asyncio.to_thread(eventually, lambda: bool(open_image_files(program, image)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (open_image_files(program, image), list(image.iterdir())) == (set(), [])

    run(body)
    assert program.computes()


def test_worker_that_is_killed_before_it_takes_away_costs_the_fast_way(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            pass
        content = program.digest("vram")
        worker().kill()
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert (way.data_path.name, way.files) == ("plain", ())
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content

    run(body)


def test_process_that_is_killed_is_named(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            pass
        os.kill(program.pid, signal.SIGKILL)
        assert eventually(lambda: not read_maps(program.pid))
        with pytest.raises(Exception, match=r"has ended"):
            await way.moved_out(image, Operation("checkpoint"), lambda: False).__aenter__()
        assert list(image.iterdir()) == []

    run(body)

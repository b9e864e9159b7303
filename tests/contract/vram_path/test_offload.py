"""VRAM bytes that are moved into the image's files, and back into the program."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu import vram
from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from tests.contract.vram_path.moving import (
    LOG,
    MIB,
    SETTINGS,
    assert_filled,
    maps_and_fills,
    out,
    place,
    run,
    workers,
)
from tests.fakes.actor import Actor

pytestmark = pytest.mark.root


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_bytes_leave_and_come_back(program: Actor, image: Path, threads: int) -> None:
    program.region("own", 4 * MIB)
    program.fill("own", 0, 4 * MIB)

    async def body(children: Children) -> None:
        checkpoint = maps_and_fills(program, size=33 * MIB)
        async with out(children, image, checkpoint, program, settings=replace(SETTINGS, threads=threads)) as way:
            before = program.digest("own")
            assert way.data_path.name == "fast"
            (file,) = way.files
            assert (file.pid, file.size) == (program.pid, 33 * MIB)
            assert [path.name for path in image.iterdir()] == [f"kybernate-vram-{program.pid}-0.bin"]
            assert program.resident_kib(place(program, size=33 * MIB)) == 0
        assert program.digest("own") == before

    run(body)
    assert_filled(program, 33 * MIB)
    assert program.computes()


def test_other_threads_stand_still_while_the_driver_works_and_not_longer(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        def checkpoint() -> None:
            assert program.stands_still()
            maps_and_fills(program)()

        async with out(children, image, checkpoint, program):
            assert program.computes()

    run(body)


def test_several_processes_and_regions_with_holes(image: Path) -> None:
    async def body(children: Children) -> None:
        with Actor() as one, Actor() as two:
            digests: list[str] = []

            def checkpoint() -> None:
                for number, program in enumerate((one, two)):
                    program.region("a", 4 * MIB)
                    program.fill("a", 0, 4 * MIB, seed=number)
                    program.region("big", 64 * MIB)
                    program.fill("big", 20 * MIB, 21 * MIB, seed=number)
                digests.extend(program.digest(name) for program in (one, two) for name in ("a", "big"))

            async with out(children, image, checkpoint, one, two) as way:
                assert {file.pid for file in way.files} == {one.pid, two.pid}
                assert sum(path.stat().st_blocks for path in image.iterdir()) * 512 < 14 * MIB
                assert sum(file.data_bytes for file in way.files) == 10 * MIB
            assert [program.digest(name) for program in (one, two) for name in ("a", "big")] == digests
            assert one.resident_kib(place(one, "big", 64 * MIB)) <= 4 * 1024  # zeros were not written

    run(body)


def test_failure_after_the_drop_puts_the_bytes_back(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async def fail() -> None:
            async with out(children, image, maps_and_fills(program), program):
                assert program.resident_kib(place(program)) == 0
                raise RuntimeError("CRIU failed")

        with pytest.raises(RuntimeError, match="CRIU failed"):
            await fail()

    run(body)
    assert_filled(program)


def test_process_that_is_gone_is_not_filled(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True):
            pass
        assert program.resident_kib(place(program)) == 0

    run(body)


def test_traced_process_takes_the_plain_path(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        with SeizedProcess(program.pid, spare=lambda name: name.startswith("cuda")):
            way = VramOffload(children, SETTINGS, LOG)
            async with aclosing(way), way.watching([program.pid], image=image):
                maps_and_fills(program)()
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                assert (way.data_path.name, way.files) == ("plain", ())
                assert "traces it already" in way.data_path.why
                assert program.resident_kib(place(program)) == 8 * 1024
        assert list(image.iterdir()) == []
        assert workers() == []

    run(body)


def test_setting_plain_starts_no_worker(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        settings = replace(SETTINGS, data_path="plain")
        async with out(children, image, maps_and_fills(program), program, settings=settings) as way:
            assert (way.data_path.name, way.data_path.why) == ("plain", "gpu.data_path")
            assert workers() == []

    run(body)


def test_failed_checkpoint_resumes_the_threads(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        with pytest.raises(RuntimeError, match="driver"):
            async with aclosing(way), way.watching([program.pid], image=image):
                raise RuntimeError("the driver failed")

    run(body)
    assert program.computes()


def test_threads_resume_when_the_driver_takes_too_long(
    program: Actor, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it waits for a lock that one of them holds."""
    monkeypatch.setattr(vram, "HOLD_SECONDS", 0.5)

    async def body(children: Children) -> None:
        def checkpoint() -> None:
            assert program.computes()
            maps_and_fills(program)()

        async with out(children, image, checkpoint, program) as way:
            assert (way.data_path.name, way.files) == ("plain", ())
            assert "longer than 0.5 s" in way.data_path.why
            assert program.resident_kib(place(program)) == 8 * 1024

    run(body)


def test_cancelled_save_leaves_the_process_as_it_was(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program, size=128 * MIB)()

            async def move() -> None:
                async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                    await asyncio.sleep(60)

            moving = asyncio.ensure_future(move())
            await asyncio.sleep(0.03)
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
        assert program.resident_kib(place(program, size=128 * MIB)) == 128 * 1024

    run(body)
    assert program.computes()

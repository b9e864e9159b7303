"""VRAM bytes that are moved from an image into a restored program, and memory that is prefaulted for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from kybernate_shim.checkpoint.gpu.vram import PREFAULT_BYTES, VramOffload, VramReload, prefaulted
from kybernate_shim.checkpoint.image.manifest import File, Host, Manifest, Program, Source, now
from kybernate_shim.checkpoint.image.store import Image, write_manifest
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.gpu.mover_client import vram_mover
from kybernate_shim.linux.children import Children
from kybernate_shim.vram_io.errors import DataPathRefused, VramError
from kybernate_shim.worker_protocol.mover_jobs import ImageFiles, Watch
from tests.bench.page_cache import evict
from tests.contract.vram_path.moving import (
    HUGE,
    LOG,
    MIB,
    SETTINGS,
    assert_filled,
    flip,
    maps_and_fills,
    out,
    resident_of_its_own,
    run,
    workers,
)
from tests.fakes.actor import Actor

pytestmark = pytest.mark.root


def finished(directory: Path, way: VramOffload) -> Image:
    """Make an image of what was moved out."""
    manifest = Manifest(
        id="i",
        time=now(),
        source=Source("c"),
        runtime=Program("runc", "1"),
        criu=Program("criu", "4.2"),
        host=Host("6", "x86_64", (), 2, 4096),
        vram=way.files,
        data_path=way.data_path,
        files=tuple(File(file.file, file.size, file.digest) for file in way.files),
    )
    write_manifest(directory, manifest, durable=False)
    return Image(directory, manifest)


def test_restored_memory_is_filled_and_its_digests_compared(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True) as way:
            made = finished(image, way)
        back, operation = VramReload(children, SETTINGS, LOG), Operation("restore")
        evict(image)  # what is on a disk has to come from there
        async with back.expecting(made):
            await back.fill(made, {program.pid: program.pid}, operation)
            assert resident_of_its_own(program) == 0, "its memory is a copy, no mapping of the file"
            await back.prove(made)
        assert_filled(program)
        assert [(step.name, step.bytes) for step in operation.steps] == [("vram-load", 8 * MIB)]
        assert verify(image) == []
        assert workers() == []

    run(body)


def test_wrong_byte_is_found_by_the_restore_and_by_verify(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True) as way:
            made = finished(image, way)
        flip(image / way.files[0].file)
        back = VramReload(children, SETTINGS, LOG)
        async with back.expecting(made):

            async def fill_and_prove() -> None:
                await back.fill(made, {program.pid: program.pid}, Operation("restore"))
                await back.prove(made)

            with pytest.raises(VramError, match="must not run"):
                await fill_and_prove()
        assert [(problem.file, problem.kind) for problem in verify(image)] == [(way.files[0].file, "changed")]
        assert verify(image, vram=False) == []

    run(body)


def test_process_that_keeps_its_bytes_gets_its_memory_from_us(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with prefaulted(children, HUGE, LOG, [program.pid], PREFAULT_BYTES):
            assert len(workers()) == 1
            region = program.map_populated("vram", 16 * MIB)
            assert program.computes()
        assert workers() == []
        assert region.private_anonymous
        assert program.resident_kib(region, "AnonHugePages") > 0
        program.fill("vram", 0, 16 * MIB)

    run(body)
    assert program.computes()


def test_without_a_worker_the_driver_makes_its_memory(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with prefaulted(children, HUGE, LOG, [program.pid], PREFAULT_BYTES):
            (one,) = workers()
            one.kill()
            region = program.map_populated("vram", 16 * MIB)
            program.fill("vram", 0, 16 * MIB)
        assert program.resident_kib(region) >= 16 * 1024

    run(body)
    assert program.computes()


def test_little_memory_is_not_worth_a_worker(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with prefaulted(children, HUGE, LOG, [program.pid], PREFAULT_BYTES - 1):
            assert workers() == []

    run(body)


def test_worker_that_fails_in_an_unforeseen_way_is_lost(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with vram_mover(children) as worker:
            files = ImageFiles(Path("/nowhere"), threads=-1)
            with pytest.raises(DataPathRefused, match=r"status 1: .*ValueError"):
                await worker.ask(Watch((program.pid,), 60, {}, files, huge=False))

    run(body)
    assert program.computes()


def test_worker_ends_with_its_shim(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with vram_mover(children) as worker:
            names = {program.pid: program.pid}
            files = ImageFiles(Path("/nowhere"), threads=2)
            await worker.ask(Watch((program.pid,), 60, names, files, huge=False))
            process = psutil.Process(worker.pid)
            worker._client.close()
            await asyncio.to_thread(process.wait, 10)

    run(body)
    assert program.computes()

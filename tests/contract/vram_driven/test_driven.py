"""The driver's own copy as a file of the image: caught while it is mapped, taken away for a dump, given back."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.vram_io.errors import FileFailed
from kybernate_shim.vram_io.file_digests import of_file
from kybernate_shim.vram_io.saved_regions import mapped_files
from kybernate_shim.vram_io.thread_pool import CopyOptions
from tests.contract.vram_driven.driving import (
    MIB,
    SIZE,
    descriptors,
    digest,
    mapping,
    run,
    watched,
)
from tests.fakes.actor import Actor

pytestmark = pytest.mark.root


def test_driver_writes_the_image_itself_and_a_dump_finds_empty_memory(program: Actor, image: Path) -> None:
    held = descriptors(program)

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            assert mapping(program).perms == "rw-s"
        content = program.digest("vram")
        assert way.driven == {program.pid: SIZE}
        assert program.computes()
        operation = Operation("checkpoint")
        async with way.moved_out(image, operation, lambda: False):
            (file,) = way.files
            place = mapping(program)
            assert place.private_anonymous
            assert (file.start, file.size, file.data_bytes) == (program.ask("where('vram')"), SIZE, SIZE)
            path = image / file.file
            assert digest(path.read_bytes()) == content
            assert file.digest == of_file(path, CopyOptions().piece_bytes, CopyOptions())
            assert program.resident_kib(Region(file.start, file.start + SIZE, "rw-p", 0, "")) == 0
        assert program.digest("vram") == content
        assert mapping(program).private_anonymous
        assert way.data_path.name == "fast"
        assert [(step.name, step.bytes) for step in operation.steps] == [("vram-save", SIZE), ("vram-load", SIZE)]

    run(body)
    assert descriptors(program) == held


def test_zeros_become_holes(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image):
            program.region("vram", SIZE)
            program.fill("vram", 2 * MIB, 4 * MIB)
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (file,) = way.files
            assert file.data_bytes == 2 * MIB
            assert (image / file.file).stat().st_blocks * 512 == 2 * MIB
        assert program.digest("vram") == content

    run(body)


def test_only_the_first_large_mapping_is_the_files(program: Actor, image: Path) -> None:
    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image):
            program.region("small", MIB)
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            program.region("more", SIZE)
            program.fill("more", 0, SIZE, seed=2)
        content, more = program.digest("vram"), program.digest("more")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert [file.size for file in way.files] == [SIZE, SIZE]
            assert sorted(path.name for path in image.iterdir()) == sorted(file.file for file in way.files)
        assert (program.digest("vram"), program.digest("more")) == (content, more)

    run(body)


def test_without_room_the_driver_gets_its_memory(program: Actor, image: Path) -> None:
    """And the checkpoint fails, for what it would have to copy has no room either."""

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image, size=96 * MIB):
            pass
        assert mapping(program).private_anonymous
        assert (way.driven, list(image.iterdir())) == ({}, [])
        content = program.digest("vram")
        with pytest.raises(FileFailed, match="No space left"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert program.digest("vram") == content

    run(body)


def test_child_of_the_process_has_nothing_of_it(program: Actor, image: Path) -> None:
    """A dump of the child would look for the file, and a restore, too."""

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            pass
        start = program.ask("where('vram')")
        child = program.ask("os.fork() or signal.pause()")
        try:
            assert any(one.start <= start < one.end for one in read_maps(program.pid))
            assert not any(one.start <= start < one.end for one in read_maps(child))
        finally:
            os.kill(child, signal.SIGKILL)

    run(body)


def test_file_of_the_same_number_on_another_filesystem_is_not_taken_for_it(
    program: Actor, image: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", other], check=True)
    try:
        for directory in (image, other):
            (directory / "kybernate-vram-1-0.bin").write_bytes(bytes(SIZE))
        assert len({(one / "kybernate-vram-1-0.bin").stat().st_ino for one in (image, other)}) == 1
        path = str(other / "kybernate-vram-1-0.bin")
        program.ask(f"maps.update(vram=mmap.mmap(os.open({path!r}, os.O_RDWR), 0))")
        assert mapping(program).perms == "rw-s"
        assert mapped_files([program.pid], image) == {}
        assert mapped_files([program.pid], other).keys() == {program.pid}
    finally:
        subprocess.run(["umount", "--lazy", other], check=True)

"""A process that keeps more than it was lent: the file of the image, or the pages of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu import vram
from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.vram_io.errors import FileFailed
from kybernate_shim.vram_io.file_digests import of_file
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.driven import MemoryAllowance
from tests.contract.vram_driven.driving import (
    MIB,
    SIZE,
    digest,
    mapping,
    pooled,
    run,
    used_bytes,
)
from tests.fakes.actor import Actor

pytestmark = pytest.mark.root

KEEP = {  # how the thread that pretends to be the driver's keeps the file that it finds among its descriptors
    "descriptor": "kept.append(os.dup(lent()))",
    "descriptor-to-read": "kept.append(os.open(f'/proc/self/fd/{lent()}', os.O_RDONLY))",
    "mapping": "kept.append(mmap.mmap(lent(), 0))",
    "in-a-socket": "(kept.extend(socket.socketpair()), socket.send_fds(kept[0], [b'x'], [lent()]))",
}
LENT = (
    "globals().update(kept=[], socket=__import__('socket'), path='/proc/self/fd/{{}}'.format,"
    "lent=lambda: next(n for n in range(3, 99) if os.path.exists(path(n)) and os.stat(path(n)).st_dev == {device}))"
)


def keep(program: Actor, image: Path, how: str) -> None:
    program.ask(f"str({LENT.format(device=image.stat().st_dev)})")
    assert program.ask(f"str({how})") is not None


@pytest.mark.parametrize("how", KEEP.values(), ids=KEEP)
def test_file_that_the_process_has_kept_is_not_the_images(program: Actor, image: Path, how: str) -> None:
    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            keep(program, image, how)
            inode = mapping(program).inode
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (file,) = way.files
            path = image / file.file
            assert list(image.iterdir()) == [path]
            assert path.stat().st_ino != inode
            assert (way.data_path.name, way.data_path.why) == ("fast", vram.COPIED)
            assert digest(path.read_bytes()) == content
            assert file.digest == of_file(path, CopyOptions().piece_bytes, CopyOptions())
            assert used_bytes(image) <= SIZE + 2 * MIB  # what was kept has no memory any more
        assert program.digest("vram") == content

    run(body)


def test_path_that_the_process_has_kept_leads_to_no_writing(program: Actor, image: Path) -> None:
    """A descriptor of O_PATH counts as none; root could make another one of it, for writing."""

    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            keep(program, image, "kept.append(os.open(f'/proc/self/fd/{lent()}', os.O_PATH))")
            assert program.ask("os.close(os.open(f'/proc/self/fd/{kept[0]}', os.O_RDWR))") is None
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert way.data_path.why == vram.BY_THE_DRIVER
            with pytest.raises(OSError, match="Read-only"):
                os.open(f"/proc/{program.pid}/fd/{program.ask('kept[0]')}", os.O_RDWR)

    run(body)


def test_pages_of_a_file_that_was_kept_but_not_taken_are_given_back(program: Actor, image: Path) -> None:
    settings = pooled(image, SIZE)

    async def body(way: VramOffload) -> None:
        assert used_bytes(image) >= SIZE
        async with way.watching([program.pid], image=image, size=SIZE):
            keep(program, image, KEEP["descriptor"])
        assert used_bytes(image) < MIB

    run(body, settings)


def test_copy_without_room_leaves_the_process_its_bytes(program: Actor, image: Path) -> None:
    size = 40 * MIB

    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image, size=size):
            program.region("vram", size)
            program.fill("vram", 0, size)
            keep(program, image, KEEP["descriptor"])
        content = program.digest("vram")
        with pytest.raises(FileFailed, match="No space left"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert mapping(program).private_anonymous
        assert program.digest("vram") == content
        assert list(image.iterdir()) == []
        assert used_bytes(image) < MIB

    run(body)


def test_more_than_the_driver_holds_is_not_taken_from_the_image(program: Actor, image: Path) -> None:
    """What a thread asks for that only has a name like the driver's; the driver is still served after it."""
    held = 16 * MIB
    most = held + held // MemoryAllowance.MARGIN_SHARE + MemoryAllowance.MARGIN_BYTES

    subprocess.run(["mount", "-o", "remount,size=2g", image], check=True)

    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image, size=held):
            program.region("greed", most + MIB)
            assert used_bytes(image) < MIB
            program.region("vram", held)
            program.fill("vram", 0, held)
            assert mapping(program).perms == "rw-s"
        assert way.driven == {program.pid: held}

    run(body)

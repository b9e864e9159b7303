"""Memory of the pool that the driver writes into."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from tests.contract.vram_driven.driving import (
    MIB,
    SIZE,
    digest,
    mapping,
    open_image_files,
    pooled,
    run,
    watched,
)
from tests.fakes.actor import Actor

pytestmark = pytest.mark.root


@pytest.mark.parametrize("ready", [SIZE - 2 * MIB, SIZE, SIZE + 4 * MIB])
def test_driver_writes_into_memory_of_the_pool(program: Actor, image: Path, ready: int) -> None:
    settings = pooled(image, ready)
    (file,) = image.glob("pool/*")
    inode = file.stat().st_ino

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image):
            assert mapping(program).inode == inode
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (found,) = way.files
            path = image / found.file
            assert (path.stat().st_ino, path.stat().st_size, found.data_bytes) == (inode, SIZE, SIZE)
            assert digest(path.read_bytes()) == content
        assert program.digest("vram") == content

    run(body, settings)
    assert list(image.glob("pool/*")) == []


def test_memory_of_the_pool_that_a_process_has_held_is_not_given_to_another(program: Actor, image: Path) -> None:
    settings = pooled(image, SIZE)

    async def body(way: VramOffload) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            assert open_image_files(program, image)
            program.region("small", MIB)  # too small to be what was expected
        assert way.driven == {}

    run(body, settings)
    assert list(image.rglob("*")) == [image / "pool"]
    assert open_image_files(program, image) == set()


def test_pool_makes_way_for_what_needs_the_room(program: Actor, image: Path) -> None:
    """Of the 64 MiB, 56 are the pool's."""
    size = 60 * MIB
    settings = pooled(image, 28 * MIB, 28 * MIB)

    async def body(way: VramOffload) -> None:
        async with watched(way, program, image, size):
            pass
        assert way.driven == {program.pid: size}

    run(body, settings)
    assert list(image.glob("pool/*")) == []

"""A program whose driver's copy is a file of the image, and queries of its memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import structlog

from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.config import GpuSettings
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.vram_io.image_pool_filling import fill
from tests.contract.vram_path.moving import workers
from tests.fakes.actor import Actor

MIB = 1 << 20
SIZE = 8 * MIB
SETTINGS = GpuSettings(huge_pages="off", threads=2)
LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


def run(body: Callable[[VramOffload], Awaitable[None]], settings: GpuSettings = SETTINGS) -> None:
    async def main() -> None:
        children = Children()
        children.attach(asyncio.get_running_loop())
        async with asyncio.timeout(60), aclosing(VramOffload(children, settings, LOG)) as way:
            await body(way)

    asyncio.run(main())


@asynccontextmanager
async def watched(way: VramOffload, program: Actor, image: Path, size: int = SIZE) -> AsyncIterator[None]:
    """Have the program move `size` bytes, as the driver does, and run the body right after, within the watch."""
    async with way.watching([program.pid], image=image, size=size):
        program.region("vram", size)
        program.fill("vram", 0, size)
        yield


def mapping(program: Actor) -> Region:
    start = program.ask("where('vram')")
    return next(one for one in read_maps(program.pid) if one.start <= start < one.end)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def descriptors(program: Actor) -> set[str]:
    return {str(fd.readlink()) for fd in Path(f"/proc/{program.pid}/fd").iterdir()}


def open_image_files(program: Actor, image: Path) -> set[int]:
    """Return the descriptors of files on the image's tmpfs, removed ones among them."""
    device = image.stat().st_dev
    return {int(fd.name) for fd in Path(f"/proc/{program.pid}/fd").iterdir() if fd.stat().st_dev == device}


def worker() -> psutil.Process:
    (one,) = workers()
    return one


def pooled(image: Path, *sizes: int) -> GpuSettings:
    """Return settings with a pool on the image's tmpfs."""
    directory = image / "pool"
    fill(directory, sizes)
    return replace(SETTINGS, image_pool=directory, image_pool_files=sizes)


def used_bytes(image: Path) -> int:
    space = os.statvfs(image)
    return (space.f_blocks - space.f_bfree) * space.f_frsize

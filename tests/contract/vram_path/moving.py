"""Offload and reload of VRAM bytes by real worker processes on real memory, without a driver.

The programs play the driver's part: a thread with its name maps and fills memory while all others are held.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import structlog

from kybernate_shim.checkpoint.gpu.vram import VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import GpuSettings
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.process_memory import Region
from kybernate_shim.worker_protocol.mover_jobs import PROGRAM
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
SETTINGS = GpuSettings(huge_pages="off", threads=2)
HUGE = replace(SETTINGS, huge_pages="process")
LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


def run(body: Callable[[Children], Awaitable[None]]) -> None:
    async def main() -> None:
        children = Children()
        children.attach(asyncio.get_running_loop())
        async with asyncio.timeout(60):
            await body(children)

    asyncio.run(main())


@asynccontextmanager
async def out(
    children: Children,
    image: Path,
    checkpoint: Callable[[], object],
    *programs: MemoryProcess,
    settings: GpuSettings = SETTINGS,
    gone: bool = False,
) -> AsyncIterator[VramOffload]:
    """Take what `checkpoint` maps in the programs out, and put it back in the end."""
    way = VramOffload(children, settings, LOG)
    async with aclosing(way):
        async with way.watching([program.pid for program in programs], image=image):
            checkpoint()
        async with way.moved_out(image, Operation("checkpoint"), lambda: gone):
            yield way


def maps_and_fills(program: MemoryProcess, name: str = "vram", size: int = 8 * MIB) -> Callable[[], None]:
    def act() -> None:
        program.region(name, size)
        program.fill(name, 0, size)

    return act


def assert_filled(program: MemoryProcess, size: int = 8 * MIB) -> None:
    """The memory of `maps_and_fills` holds what it was filled with."""
    maps_and_fills(program, "same", size)()
    assert program.digest("vram") == program.digest("same")


def place(program: MemoryProcess, name: str = "vram", size: int = 8 * MIB) -> Region:
    start = program.ask(f"where({name!r})")
    return Region(start, start + size, "rw-p", 0, "")


def resident_of_its_own(program: MemoryProcess) -> int:
    """Return the KiB that the program needs for the memory of `maps_and_fills`, without the image's files."""
    return program.resident_kib(place(program), "Anonymous")


def workers() -> list[psutil.Process]:
    """Return this process's children that move VRAM; others of them may end meanwhile."""
    found = psutil.process_iter(["ppid", "cmdline"])
    return [one for one in found if one.info["ppid"] == os.getpid() and PROGRAM in (one.info["cmdline"] or [])]


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(MIB + 7)
        byte = file.read(1)[0]
        file.seek(MIB + 7)
        file.write(bytes([byte ^ 1]))

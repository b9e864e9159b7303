"""A restore from an image whose files with VRAM still arrive: CRIU works meanwhile, the processes wait for the rest.

CRIU holds them, before their first instruction, until the last byte is there: an arrival that fails leaves nothing that
has computed without its memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.image.manifest import ARRIVING
from kybernate_shim.checkpoint.image.plaintext_memory import remove_stale
from kybernate_shim.checkpoint.image.store import Image, read_image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import HeldFailed, Refused
from kybernate_shim.linux.locks import lock_open
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.run_directory import ARRIVING as MEMORY
from kybernate_shim.steps import Step
from kybernate_shim.vram_io.errors import VramError

if TYPE_CHECKING:
    from kybernate_shim.vram_io.arrival import Arrival

STEP = "arrival"


@asynccontextmanager
async def claimed(image: Image) -> AsyncIterator[Image]:
    """Claim an arriving image for the block; another restore is refused where its files are freed as they are read.

    Yields the image as it is now: it may have arrived in the meantime. Raises Refused and HeldFailed.
    """
    if not image.arriving:
        yield image
        return
    try:
        lock = open_plain(image.path / ARRIVING)
    except FileNotFoundError:
        yield replace(read_image(image.path), checked=image.checked)
        return
    transient = False
    try:
        arrival = _arrival(image)
        if transient := arrival is not None and arrival.description.transient:
            _claim(lock, image.path)
        yield image
    finally:
        os.close(lock)
        if transient:
            await asyncio.to_thread(remove_stale, MEMORY)  # of one whose sender was killed


def _claim(lock: int, image: Path) -> None:
    if not lock_open(lock):
        raise Refused(f"{image} arrives for another restore. Nothing was restored")


def source_of(image: Image) -> str:
    """Return where an image comes from: `ram`, `disk`, or what its arrival names, a tier and its place."""
    if (arrival := _arrival(image)) is not None:
        return arrival.source
    from kybernate_shim.vram_io.files import lies_in_memory  # wants ctypes, which few shims need

    return "ram" if lies_in_memory(image.path) else "disk"


def _arrival(image: Image) -> Arrival | None:
    """Return the record of an image, None where all of it is there. Raises HeldFailed."""
    if not image.arriving:
        return None
    from kybernate_shim.vram_io.arrival import arrival_in  # few images arrive

    try:
        return arrival_in(image.path)
    except VramError as error:
        raise HeldFailed(f"{error}. Nothing was restored") from error


class Awaited:
    """The rest of an image that arrives for one restore. `step` says what the wait has cost, once it is over."""

    def __init__(self, arrival: Arrival, operation: Operation) -> None:
        self._arrival = arrival
        self._operation = operation
        self._stop = threading.Event()
        self.step = Step(STEP)

    def stop(self) -> None:
        """End the wait."""
        self._stop.set()

    async def wait(self) -> None:
        """Wait until all is there, and note where it came from. Raises HeldFailed."""
        total = sum(self._arrival.description.files.values())
        with self._operation.waiting(self.step, total, lambda: self._arrival.bytes_here):
            try:
                await asyncio.to_thread(self._arrival.wait_all, self._stop.is_set)
            except VramError as error:
                raise HeldFailed(str(error)) from error
        self._operation.comes_from(self._arrival.source)  # another copy may have continued


def awaited(image: Image, operation: Operation) -> Awaited | None:
    """Return what a restore has to wait for, None where all is there. Raises HeldFailed."""
    arrival = _arrival(image)
    return Awaited(arrival, operation) if arrival is not None and arrival.description.files else None

"""Moves the VRAM bytes that the node's arena holds for a container into its image and out of it, bypassing CRIU.

CRIU does not see them: they are not memory of the processes. They are written to the image while CRIU dumps, and read
straight into the arena while it restores, and the driver after it. From there they are copied to the GPU as they come,
as after a suspend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.checkpoint.compat import Difference
from kybernate_shim.checkpoint.gpu.usage import inner_pid
from kybernate_shim.checkpoint.gpu.vram import new_files
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import GpuSettings
from kybernate_shim.gpu.mover_client import Spawner, VramMover, vram_mover
from kybernate_shim.steps import Step
from kybernate_shim.vram_io.digest import KIND
from kybernate_shim.vram_io.errors import NotInArena
from kybernate_shim.vram_io.image_files import ArenaFile
from kybernate_shim.worker_protocol.mover_jobs import (
    AwaitArena,
    ClaimArena,
    HandOver,
    HoldArena,
    ImageFiles,
    LoadArena,
    SaveArena,
)

RESTORE_SECONDS = 0.5  # of the driver, with the GPU's new memory; 0.25 to 0.3 s alone on an H200
PAUSE = 0.01  # between two looks at what has been loaded


class ArenaOffload:
    """What the arena has of one checkpoint's processes, `sizes` in bytes by pid. `files` are for its manifest."""

    def __init__(self, children: Spawner, settings: GpuSettings, sizes: Mapping[int, int], digest: str = KIND) -> None:
        self.files: tuple[ArenaFile, ...] = ()
        self.bytes = sum(sizes.values())
        self._children = children
        self._settings = settings
        self._digest = digest
        self._names = {pid: inner_pid(pid) or pid for pid in sizes}
        self._saving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def saving(self, image: Path, operation: Operation) -> AsyncIterator[None]:
        """Write the bytes to files of `image` while the context lasts; `complete` waits for that.

        Processes that live on must stay off their GPUs meanwhile. Raises a VramError.
        """
        if not self._names:
            yield
            return
        async with vram_mover(self._children) as worker:
            await worker.ask(HoldArena(tuple(self._names)))
            self._saving = asyncio.ensure_future(self._save(worker, image, operation))
            try:
                yield
            finally:
                await _end(self._saving)

    async def complete(self) -> None:
        """Return when all bytes are in the image. Raises a VramError; the arena still has them."""
        if self._saving is not None:
            await self._saving

    async def _save(self, worker: VramMover, image: Path, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = SaveArena(self._names, new_files(image, self._settings, self._digest))
        saved = await worker.ask(job)
        self.files = tuple(saved)
        operation.steps.append(Step("arena-save", loop.time() - began, self.bytes))


class ArenaReload:
    """The bytes of one restore."""

    def __init__(self, children: Spawner, settings: GpuSettings) -> None:
        self._children = children
        self._settings = settings
        self._worker: VramMover | None = None
        self._loading: asyncio.Task[None] | None = None
        self._readying: asyncio.Task[None] | None = None
        self._began = 0.0  # of the load, on the loop's clock

    def compare(self, manifest: Manifest) -> list[Difference]:
        """Return what speaks against restoring the image here."""
        wanted = manifest.arena_bytes
        if not wanted:
            return []
        if not self._settings.arena:
            return [_lacking(wanted, "there is none on this node")]
        memory = Memory(self._settings.arena)
        try:
            memory.prepare(grow=False)
            free = memory.free()
        except OSError as error:
            return [_lacking(wanted, str(error))]
        return [] if free >= wanted else [_lacking(wanted, f"{free >> 20} of its {memory.size >> 20} MiB are free")]

    @asynccontextmanager
    async def expecting(
        self, image: Image, near: int, get_ready: Callable[[int], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Read the bytes into the arena while the context lasts, in which CRIU works and `hand_over` is called.

        They go near the NUMA node `near`. `get_ready` gets the process that has them, and runs in parallel.
        """
        files = image.manifest.arena
        if not files:
            yield
            return
        async with vram_mover(self._children) as self._worker:
            self._loading = asyncio.ensure_future(self._load(self._worker, image, near, get_ready))
            try:
                yield
            finally:
                await _end(self._loading)
                if self._readying is not None:
                    await _end(self._readying)

    async def _load(
        self, worker: VramMover, image: Image, near: int, get_ready: Callable[[int], Coroutine[Any, Any, None]]
    ) -> None:
        settings = self._settings
        await worker.ask(ClaimArena(list(image.manifest.arena), settings.arena, settings.arena_share, near))
        self._readying = asyncio.ensure_future(get_ready(worker.pid))
        self._began = asyncio.get_running_loop().time()
        await worker.ask(LoadArena(ImageFiles(image.path, settings.threads, arriving=image.arriving)))

    async def hand_over(self, image: Image, pids: Mapping[int, int], operation: Operation) -> None:
        """Let the bytes be the restored processes', `pids` from the container's to the host's.

        It waits until the rest of them comes in the time that the driver's restore takes: that keeps other containers
        off the GPU. `loaded` has to follow before the processes run. Raises a VramError.
        """
        if not image.manifest.arena:
            return
        assert self._worker is not None
        assert self._loading is not None
        with operation.step("arena-load") as step:
            await self._loading
            if self._readying is not None:
                # The helper's context must not come while the driver fills a GPU of which the room has been counted.
                await asyncio.wait([self._readying])
            try:
                await self._nearly_loaded(self._worker, sum(file.size for file in image.manifest.arena))
                await self._worker.ask(HandOver({file.pid: pids[file.pid] for file in image.manifest.arena}))
            except (ArenaIncomplete, NotInArena):
                await self.loaded(image)  # it says why
                raise
            step.bytes = image.manifest.arena_bytes

    async def loaded(self, image: Image) -> None:
        """Return when all bytes are there, and have been compared with the manifest's digests. Raises a VramError."""
        if image.manifest.arena:
            assert self._worker is not None
            await self._worker.ask(AwaitArena())

    async def _nearly_loaded(self, worker: VramMover, size: int) -> None:
        loop = asyncio.get_running_loop()
        memory, owner = Memory(0), ArenaOwner.of(worker.pid)
        while not nearly(memory.filled(owner), size, loop.time() - self._began):  # noqa: ASYNC110  # another process's
            await asyncio.sleep(PAUSE)


def nearly(filled: int, size: int, seconds: float) -> bool:
    """Return whether the rest of `size` bytes comes within RESTORE_SECONDS, if `filled` have come in `seconds`."""
    return filled >= size or (size - filled) * seconds <= filled * RESTORE_SECONDS


def _lacking(wanted: int, why: str) -> Difference:
    advice = "free some of it, or make `gpu.arena` larger"
    return Difference(
        "GPU arena", "", f"the image needs {wanted >> 20} MiB of the node's, and {why}; {advice}", "refusal"
    )


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel what still runs; a failure is of no interest any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""What has left its GPUs: whose memory, on which GPUs, and where it is meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.checkpoint.gpu.arena import ArenaOffload
from kybernate_shim.checkpoint.gpu.inherited import InheritedRelease
from kybernate_shim.checkpoint.gpu.parking import Parked
from kybernate_shim.checkpoint.gpu.usage import GpuUsage
from kybernate_shim.checkpoint.gpu.vram import BytesLost, VramOffload
from kybernate_shim.checkpoint.image.manifest import (
    DataPath,
    GpuMemory,
    Released,
    UsedGpu,
)
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.vram_io.image_files import ArenaFile, VramFile


@dataclass(frozen=True)
class ArenaUse:
    """What a container got of the arena that it `asked` for, and for what `reasons` that is not all of its VRAM."""

    asked: bool = False
    bytes: int = 0
    reasons: tuple[str, ...] = ()


@dataclass
class Left:
    """What has left its GPUs. Set `gone` where the processes have ended, so that none is brought back.

    `parked` is what of it is on the disk.
    """

    usage: GpuUsage = field(default_factory=GpuUsage)
    visible_gpus: tuple[str, ...] = ()
    pids: Sequence[int] = ()
    gone: bool = False
    arena_use: ArenaUse = ArenaUse()
    parked: list[Parked] = field(default_factory=list)
    way: VramOffload | None = None
    away: ArenaOffload | None = None
    inheritance: InheritedRelease | None = None
    note_whole: Callable[[bool], None] = lambda whole: None  # called before a part of the processes is in files only

    @property
    def vram(self) -> tuple[VramFile, ...]:
        return self.way.files if self.way is not None else ()

    @property
    def data_path(self) -> DataPath:
        return self.way.data_path if self.way is not None else DataPath("plain")

    @property
    def driven_bytes(self) -> int:
        """What the driver has put into files of the image, and the processes have mapped until they are moved out."""
        return sum(self.way.driven.values()) if self.way is not None else 0

    @property
    def arena(self) -> tuple[ArenaFile, ...]:
        return self.away.files if self.away is not None else ()

    @property
    def arena_bytes(self) -> int:
        return self.away.bytes if self.away is not None else 0

    @asynccontextmanager
    async def moved_out(self, image: Path, operation: Operation) -> AsyncIterator[None]:
        """Keep the VRAM bytes in files of `image` while the context lasts. Raises as VramOffload.moved_out."""
        assert self.way is not None
        assert self.away is not None
        self.note_whole(False)
        try:
            async with self.way.moved_out(image, operation, lambda: self.gone), self.away.saving(image, operation):
                self.note_whole(self.data_path.name == "plain")
                yield
        except BytesLost:
            raise
        except BaseException:
            self.note_whole(True)
            raise
        self.note_whole(True)

    async def complete(self) -> None:
        """Return when all VRAM bytes are in the image; the arena's bypass CRIU. Raises a VramError."""
        if self.away is not None:
            await self.away.complete()

    async def release(self, operation: Operation) -> None:
        """Have forked processes give up what they have inherited; they must run, not be frozen. Raises Refused."""
        if self.inheritance is not None:
            try:
                await self.inheritance.run(operation)
            except CudaError as error:
                raise Refused(f"{error}; the container continues as before") from error

    async def must_release(self) -> bool:
        """Return whether one of the processes, which are frozen, still holds something that CRIU cannot dump."""
        return self.inheritance is not None and await self.inheritance.needed()

    @property
    def released(self) -> tuple[Released, ...]:
        return tuple(self.inheritance.done.values()) if self.inheritance is not None else ()

    @property
    def cuda_processes(self) -> tuple[GpuMemory, ...]:
        return self.usage.processes

    @property
    def gpus(self) -> tuple[UsedGpu, ...]:
        return self.usage.gpus

    @property
    def vram_bytes(self) -> int:
        return self.usage.vram_bytes

    @property
    def parked_bytes(self) -> int:
        return sum(one.bytes for one in self.parked)


def joined(first: Left | None, second: Left) -> Left:
    if first is None:
        return second
    pids, one, two = [*first.pids, *second.pids], first.arena_use, second.arena_use
    use = ArenaUse(one.asked or two.asked, one.bytes + two.bytes, (*one.reasons, *two.reasons))
    return Left(second.usage, second.visible_gpus, pids, arena_use=use, parked=first.parked)

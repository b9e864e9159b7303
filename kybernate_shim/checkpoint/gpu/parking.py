"""VRAM of suspended containers below host memory: from the arena to files on a disk, and back. Their processes stay.

What parks a process, and what brings it back, is one write of its record in the arena, which says where its bytes are.
So whatever is killed, at any moment, its bytes are in one of both places. A parked process is not let back to its GPU:
the arena has only holes in place of its bytes, none of which may be read.

The files are of use to this daemon alone, with which the container ends: it alone has the key. So they need not be
proven to be whole for a later reader, but they are on the disk before the arena's room is given away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.parked import new_directory, remove
from kybernate_shim.arena.records import Record
from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.mover_client import vram_mover
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.threads import entered, to_the_end
from kybernate_shim.sizes import NO_NODE, mib
from kybernate_shim.trust.places import make_private
from kybernate_shim.vram_io.digest import STRONG
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.files import lies_in_memory
from kybernate_shim.vram_io.image_files import ArenaFile
from kybernate_shim.vram_io.sealed import KEY_BYTES
from kybernate_shim.worker_protocol.mover_jobs import (
    AwaitArena,
    ClaimArena,
    HandOver,
    HoldArena,
    ImageFiles,
    LoadArena,
    SaveArena,
)


@dataclass(frozen=True)
class Parked:
    """What of a container is in `directory`: a file for each process, by the host's pid."""

    directory: Path
    files: tuple[ArenaFile, ...]
    key: bytes = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def away(self) -> set[int]:
        """Return the processes that have their bytes here alone."""
        found = _records(Memory(0), [file.pid for file in self.files])
        return {owner.pid for owner, record in found if record.parked == str(self.directory)}

    def remove(self) -> None:
        """Remove the files, unless a process needs them. Blocks."""
        with suppress(OSError):
            remove(self.directory, Memory(0))


async def park(target: Target, pids: Sequence[int], operation: Operation, parked: list[Parked]) -> bool:
    """Move what the arena has of suspended processes to the disk, and add it to `parked`; False where it has nothing.

    Raises Refused and NoRoom: then all of it is in the arena as before.
    """
    memory = Memory(0)
    found = {owner: sum(one.size for one in record.kept) for owner, record in _records(memory, pids)}
    sizes = {owner: size for owner, size in found.items() if size}
    if not sizes:
        return False
    try:
        async with entered(_directory(target, memory)) as directory:
            with operation.step("park", total_bytes=sum(sizes.values())):
                require_space(directory, sum(sizes.values()), what="parked VRAM")
                one = await _saved(target, [owner.pid for owner in sizes], directory, operation)
            operation.commit()  # no await since the last step; from here on, a cancel comes too late
            _switch(memory, sizes, directory)
            parked.append(one)
    except (VramError, OSError) as error:
        raise Refused(f"{error}; {_stays(target)}") from error
    return True


def _switch(memory: Memory, owners: Iterable[ArenaOwner], directory: Path) -> None:
    """Have the files be where the bytes are; a process for which that fails has them in the arena, as before."""
    done = 0
    for owner in owners:
        with suppress(OSError, ArenaIncomplete):
            if owner.alive:
                memory.park(owner, directory)
                done += 1
    if not done:
        raise VramError("none of the processes that were to be parked is there any more")


async def _saved(target: Target, pids: Sequence[int], directory: Path, operation: Operation) -> Parked:
    """Write what the arena has of the processes into files, and return when the disk has them."""

    def progress(done: int) -> None:
        operation.done_bytes = done

    key = os.urandom(KEY_BYTES)
    async with vram_mover(target.children) as worker:
        await worker.ask(HoldArena(tuple(pids)))
        files = ImageFiles(directory, target.config.gpu.threads, digest=STRONG, key=key)
        saved = await worker.ask(SaveArena({pid: pid for pid in pids}, files), on_progress=progress)
    await to_the_end(lambda: _sync(directory, saved))
    return Parked(directory, tuple(saved), key)


def _sync(directory: Path, saved: Sequence[ArenaFile]) -> None:
    for file in saved:
        sync(directory / file.file)


async def bring_back(target: Target, parked: Parked, operation: Operation) -> None:
    """Move the bytes of those that live into the arena again, within the time of a restore, and remove the files.

    Raises Refused with them parked as before, whatever of them is not back.
    """
    settings, seconds, away = target.config.gpu, target.config.deadlines.restore, parked.away()
    files = [file for file in parked.files if file.pid in away]
    try:
        if files:
            with operation.step("unpark", total_bytes=sum(file.size for file in files)) as step:
                async with asyncio.timeout(seconds or None), vram_mover(target.children) as worker:
                    await worker.ask(ClaimArena(files, settings.arena, settings.arena_share, NO_NODE))
                    await worker.ask(LoadArena(ImageFiles(parked.directory, settings.threads, key=parked.key)))
                    await worker.ask(AwaitArena())
                    await worker.ask(HandOver({file.pid: file.pid for file in files}))
                step.bytes = step.bytes or operation.total_bytes
    except (VramError, OSError) as error:
        why = str(error) or f"it took longer than {seconds:g} s (deadlines.restore)"
        raise Refused(
            f"the VRAM of container {target.id}, {mib(parked.bytes)} that are parked in {parked.directory}, cannot"
            f" be brought back: {why}; it stays parked, `kybernate resume` retries"
        ) from error
    finally:
        await to_the_end(parked.remove)


def _records(memory: Memory, pids: Sequence[int]) -> Iterator[tuple[ArenaOwner, Record]]:
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            owner = ArenaOwner.of(pid)
            yield owner, memory.record(owner)


@contextmanager
def _directory(target: Target, memory: Memory) -> Iterator[Path]:
    """Make a directory for what is parked now, which stays if something is. Blocks; raises OSError and Refused."""
    root = target.config.parking_root
    make_private(root)
    if lies_in_memory(root):
        raise Refused(f"{root} is in memory, which nothing is gained by: parking_root names a directory on a disk")
    with new_directory(root, memory, f"{target.namespace}.{target.id}.") as directory:
        yield directory


def _stays(target: Target) -> str:
    return f"container {target.id} stays suspended, its VRAM in host memory"

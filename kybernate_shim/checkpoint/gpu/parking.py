"""VRAM of suspended containers below host memory: from the arena to files on a disk, and back. Their processes stay.

What parks a process, and what brings it back, is one write of its record in the arena, which says where its bytes are.
So whatever is killed, at any moment, its bytes are in one of both places. A parked process is not let back to its GPU:
the arena has only holes in place of its bytes, none of which may be read.

The files are of use to this daemon alone, with which the container ends: it alone has the key. So they need not be
proven to be whole for a later reader, but they are on the disk before the arena's room is given away.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.parked import new_directory
from kybernate_shim.arena.records import Record
from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.errors import Refused
from kybernate_shim.gpu.mover_client import vram_mover
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.locks import held
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.linux.threads import to_the_end
from kybernate_shim.sizes import NO_NODE, mib
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

    def remove(self) -> None:
        """Remove the files, which no process needs any more. Blocks."""
        shutil.rmtree(self.directory, ignore_errors=True)


async def park(target: Target, pids: Sequence[int], operation: Operation) -> Parked | None:
    """Move what the arena has of suspended processes to the disk; None where it has nothing more of them.

    Raises Refused and NoRoom: then all of it is in the arena as before.
    """
    memory, root = Memory(0), target.config.parking_root
    sizes = {pid: sum(one.size for one in record.kept) for pid, record in _records(memory, pids)}
    pids = [pid for pid, size in sizes.items() if size]
    if not pids:
        return None
    size = sum(sizes.values())
    try:
        directory, lock = await to_the_end(lambda: _directory_for(target, memory))
    except OSError as error:
        raise Refused(f"{root}: {error.strerror}; {_stays(target)}") from error
    with held(lock):
        try:
            with operation.step("park", total_bytes=size):
                require_space(directory, size, what="parked VRAM")
                parked = await _saved(target, pids, directory, operation)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, VramError | OSError):
                raise Refused(f"{error}; {_stays(target)}") from error
            raise
        operation.commit()  # no await since the last step; from here on, a cancel comes too late
        _switch(memory, pids, directory)
    if str(directory) not in memory.parked():
        shutil.rmtree(directory, ignore_errors=True)
        raise Refused(f"none of the processes that were to be parked is there any more; {_stays(target)}")
    return parked


def _switch(memory: Memory, pids: Sequence[int], directory: Path) -> None:
    """Have the files be where the bytes are; a process for which that fails has them in the arena, as before."""
    for pid in pids:
        with suppress(OSError, ArenaIncomplete):  # it has ended, most likely
            memory.park(ArenaOwner.of(pid), directory)


async def _saved(target: Target, pids: Sequence[int], directory: Path, operation: Operation) -> Parked:
    """Write what the arena has of the processes into files, and return when the disk has them."""

    def progress(done: int) -> None:
        operation.done_bytes = done

    key = os.urandom(KEY_BYTES)
    async with vram_mover(target.children) as worker:
        await worker.ask(HoldArena(tuple(pids)))
        files = ImageFiles(directory, target.config.gpu.threads, key=key)
        saved = await worker.ask(SaveArena({pid: pid for pid in pids}, files), on_progress=progress)
    await to_the_end(lambda: _sync(directory, saved))
    return Parked(directory, tuple(saved), key)


def _sync(directory: Path, saved: Sequence[ArenaFile]) -> None:
    for file in saved:
        sync(directory / file.file)


async def bring_back(target: Target, parked: Parked, operation: Operation) -> None:
    """Move the bytes of those that live into the arena again, and remove the files.

    Raises Refused with them parked as before, whatever of them is not back.
    """
    memory, settings = Memory(0), target.config.gpu
    away = {pid for pid, record in _records(memory, [file.pid for file in parked.files]) if record.parked}
    files = [file for file in parked.files if file.pid in away]
    if files:
        try:
            with operation.step("unpark", total_bytes=sum(file.size for file in files)) as step:
                async with vram_mover(target.children) as worker:
                    await worker.ask(ClaimArena(files, settings.arena, settings.arena_share, NO_NODE))
                    await worker.ask(LoadArena(ImageFiles(parked.directory, settings.threads, key=parked.key)))
                    await worker.ask(AwaitArena())
                    await worker.ask(HandOver({file.pid: file.pid for file in files}))
                step.bytes = step.bytes or operation.total_bytes
        except (VramError, OSError) as error:
            raise Refused(
                f"the VRAM of container {target.id}, {mib(parked.bytes)} that are parked in {parked.directory}, cannot"
                f" be brought back: {error}; it stays parked, `kybernate resume` retries"
            ) from error
    await to_the_end(parked.remove)


def _records(memory: Memory, pids: Sequence[int]) -> Iterator[tuple[int, Record]]:
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            yield pid, memory.record(ArenaOwner.of(pid))


def _directory_for(target: Target, memory: Memory) -> tuple[Path, int]:
    """Make a directory for what is parked now, with its lock. Raises OSError and Refused."""
    root = target.config.parking_root
    make_directory(root)
    if lies_in_memory(root):
        raise Refused(f"{root} is in memory, which nothing is gained by: parking_root names a directory on a disk")
    return new_directory(root, memory, f"{target.namespace}.{target.id}.")


def _stays(target: Target) -> str:
    return f"container {target.id} stays suspended, its VRAM in host memory"

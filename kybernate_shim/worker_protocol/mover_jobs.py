"""The jobs of the VRAM mover, which it does one after the other; pids are the host's, unless it says otherwise.

`names` are the pids of processes inside the container, by which the files of an image are named. `Watch` and `Compare`
enclose the driver's checkpoint, `Save` follows for what was found, `PutBack` undoes it; `Prefault` and `EndWatch`
enclose one that moves nothing out of the process; `Release` lets CRIU dump processes without CUDA state. `ReadAhead`,
`Load` and `Prove` are for a restore. `HoldArena`, `SaveArena`, `ClaimArena`, `LoadArena`, `HandOver` and `AwaitArena`
are for what is not in the processes but in the node's arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from kybernate_shim.sizes import NodeSizes
from kybernate_shim.vram_io import errors
from kybernate_shim.vram_io.digest import KIND
from kybernate_shim.vram_io.image_files import ArenaFile
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.worker_protocol.errors import ErrorTypes
from kybernate_shim.worker_protocol.messages import Form, Job, Message

PROGRAM = "kybernate_shim.vram_mover.worker"
ERRORS = ErrorTypes(
    errors.VramError,
    (
        errors.TargetGone,
        errors.DataPathRefused,
        errors.RegionChanged,
        errors.FileFailed,
        errors.NotTakenAway,
        errors.NotInArena,
    ),
)


class ImageFiles(msgspec.Struct, frozen=True):
    """Where files of an image are, and how bytes get there: by so many threads (0: as many as are sensible).

    New ones are made of memory of the `pool`, where that has some, and get a digest of this kind. Where the image is
    `arriving`, a read waits for what it needs. With a `key`, they are encrypted.
    """

    directory: Path
    threads: int
    pool: Path | None = None
    digest: str = KIND
    arriving: bool = False
    key: bytes = b""


class Dropping(Message, frozen=True):
    """The event of a job that saves: the pages of this part of a process are about to be dropped."""

    pid: int
    part: SavedRegion


class Compared(msgspec.Struct, frozen=True):
    """What has appeared, in bytes by pid; and by pid what the driver has put into files, which has no digest yet.

    `uncovered` says by pid why mappings that the driver took away could not be covered (see `linux.ptrace.covers`).
    """

    found: dict[int, int]
    driven: dict[int, SavedRegion]
    uncovered: dict[int, str] = {}


@dataclass(frozen=True)
class Inheritor:
    """What a process is to give up: its pid, when it began, and the descriptors that it has inherited.

    `host_bytes` is how much private memory it may get for that.
    """

    pid: int
    started: int
    inherited: frozenset[int]
    host_bytes: int = 0


@dataclass(frozen=True)
class Given:
    """What a process has given up. `kept_bytes` of the mappings' `bytes` are its private memory now."""

    pid: int
    mappings: int = 0
    bytes: int = 0
    kept_bytes: int = 0
    descriptors: int = 0


class ReleaseResult(msgspec.Struct, frozen=True):
    """What a process has given up, or why it keeps what it has."""

    pid: int
    given: Given | None = None
    kept: str = ""


class Watch(Job[None], frozen=True):
    """Stop all threads but the driver's, so that what appears in the maps from now on is the driver's alone.

    Where the files are in memory, the driver is offered some of them for what it is about to move: some `expected`
    bytes of each process, `vram_bytes` of all of them, 0 where that is not known. Else, if `huge`, its memory is made
    of
    huge pages. After `seconds` all threads are released, whatever happens.
    """

    pids: tuple[int, ...]
    seconds: float
    names: dict[int, int]
    files: ImageFiles
    huge: bool
    expected: int = 0
    vram_bytes: int = 0


class Prefault(Job[None], frozen=True):
    """Use huge pages for the memory that the driver is about to request, until `EndWatch`."""

    pids: tuple[int, ...]
    seconds: float
    threads: int


class Compare(Job[Compared], frozen=True):
    """Find what has appeared since `Watch`, and let the threads go."""


class EndWatch(Job[None], frozen=True):
    """Undo `Watch` or `Prefault`."""


class Save(Job[dict[int, list[SavedRegion]]], frozen=True):
    """Move what `Compare` has found into files; each part is announced, by Dropping, before it is dropped.

    After a failure the files stay, for `PutBack` of the parts.
    """

    names: dict[int, int]
    files: ImageFiles


class ReadAhead(Job[None], frozen=True):
    """Begin to read files into the page cache, and to prove those in memory; continue while other work is done."""

    files: ImageFiles
    regions: list[SavedRegion]


class Load(Job[None], frozen=True):
    """Fill the regions of each process, by mapping what is in memory; `Prove` has to follow."""

    files: ImageFiles
    regions: dict[int, list[SavedRegion]]


class Prove(Job[None], frozen=True):
    """Check the digests of what `Load` has only mapped. The driver may use it already."""


class PutBack(Job[None], frozen=True):
    """Undo `Save`, also for what has no digest because it was never taken away; it cannot be cancelled."""

    files: ImageFiles
    regions: dict[int, list[SavedRegion]]


class CloseFiles(Job[None], frozen=True):
    """Close the files of a directory in processes to which a killed worker has given them."""

    pids: tuple[int, ...]
    directory: Path


class HoldArena(Job[None], frozen=True):
    """Keep what the arena has of processes there, for `SaveArena`, although they may end before."""

    pids: tuple[int, ...]


class SaveArena(Job[list[ArenaFile]], frozen=True):
    """Copy what is held into files, and release it."""

    names: dict[int, int]
    files: ImageFiles


class ClaimArena(Job[None], frozen=True):
    """Find room for files of an image in the arena, of so many bytes on each node; `LoadArena` has to follow.

    They get at most a `share` of it, and it is on NUMA node `near` as far as there is any.
    """

    files: list[ArenaFile]
    arena: NodeSizes
    share: float
    near: int


class LoadArena(Job[None], frozen=True):
    """Begin to fill what was claimed from the files; `HandOver` and `AwaitArena` have to follow."""

    files: ImageFiles


class HandOver(Job[None], frozen=True):
    """Give what `LoadArena` fills to the restored processes, `pids` from the container's to the host's."""

    pids: dict[int, int]


class AwaitArena(Job[None], frozen=True):
    """Wait until all is filled and compared with the digests of the image: nothing may compute before."""


class Release(Job[list[ReleaseResult]], frozen=True):
    """Have processes give up what they have inherited of devices, by kind and major number.

    `owners` have CUDA state: what they share is left alone.
    """

    heirs: list[Inheritor]
    owners: list[int]
    majors: list[tuple[int, int]]
    seconds: float


MoverJob = (
    Watch
    | Prefault
    | Compare
    | EndWatch
    | Save
    | ReadAhead
    | Load
    | Prove
    | PutBack
    | CloseFiles
    | HoldArena
    | SaveArena
    | ClaimArena
    | LoadArena
    | HandOver
    | AwaitArena
    | Release
)
JOBS: Form[MoverJob] = Form(MoverJob, "job of the VRAM mover")
DROPPING: Form[Dropping] = Form(Dropping, "event of the VRAM mover")

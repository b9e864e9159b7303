"""Files of VRAM bytes as the manifest of an image lists them, and as the VRAM mover writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ARRIVAL: Final = "kybernate-arriving.map"  # which parts of the VRAM files are there, of an image that arrives
MOST_PIECES: Final = 1 << 18  # of a file: 512 GiB, if each has 2 MiB


@dataclass(frozen=True)
class SavedMemory:
    """A file with VRAM bytes, and the memory of a process to which they belong.

    Addresses and sizes in bytes. The file is as long as the memory; zeros may be holes in the file, and `data_bytes` is
    the rest. `digest` has the form of vram_io.digest: it is computed while the bytes are moved, and compared while they
    are moved back.
    """

    file: str
    start: int
    size: int
    data_bytes: int
    digest: str


@dataclass(frozen=True)
class OfProcess:
    """What belongs to a process, pid as in the container."""

    pid: int


@dataclass(frozen=True)
class VramFile(SavedMemory, OfProcess):
    """Saved memory as the manifest lists it. The fields of the last base come first."""


@dataclass(frozen=True)
class ArenaBlock:
    """A piece of VRAM of a process: its number in the preload library's table, its address there, its bytes."""

    index: int
    address: int
    size: int


@dataclass(frozen=True)
class ArenaHole:
    """Bytes of an arena's file that are zeros, and need no room in the arena at a restore."""

    offset: int
    size: int


@dataclass(frozen=True)
class ArenaFile:
    """A file with the bytes of all blocks, in order, that a process had in the node's arena; else as `VramFile`.

    They go into the arena of the node where the process is restored. `holes` are those that the arena knew of.
    """

    pid: int
    file: str
    size: int
    data_bytes: int
    digest: str
    blocks: tuple[ArenaBlock, ...] = field(metadata={"most": MOST_PIECES})
    holes: tuple[ArenaHole, ...] = field(default=(), metadata={"most": MOST_PIECES})

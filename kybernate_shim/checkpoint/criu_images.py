"""Reads CRIU's image files: which processes, how much memory, which mounts, what a dump cost.

Each file begins with one or two magic numbers; then come entries, each a length in 32 bits, little endian, and a
protobuf message. Only what can be said before a restore is read; CRIU alone interprets the rest.
Source: criu.org, "Images"; CRIU's criu/include/magic.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kybernate_shim.checkpoint.manifest import Process
from kybernate_shim.errors import Damaged
from kybernate_shim.messages import criu_pb2 as criu

COMMON: Final = 0x54564319
SERVICE: Final = 0x55105940
INVENTORY: Final = 0x58313116
PSTREE: Final = 0x50273030
CORE: Final = 0x55053847
PAGEMAP: Final = 0x56084025
FILES: Final = 0x56303138
MOUNTS: Final = 0x55563928
STATS: Final = 0x57093306
INTERNET_SOCKET: Final = 4
LONGEST: Final = 64 << 20  # bytes of one entry; more is a damaged length

# CRIU's numbers of filesystem types that a container's mount can have.
TYPES: Final = {
    1: "proc",
    2: "sysfs",
    3: "devtmpfs",
    4: "binfmt_misc",
    5: "tmpfs",
    6: "devpts",
    9: "securityfs",
    10: "fusectl",
    11: "debugfs",
    12: "cgroup",
    14: "mqueue",
    15: "fuse",
    17: "overlay",
    19: "tracefs",
    23: "cgroup2",
}

M = TypeVar("M", bound=Message)


class CriuImageInvalid(Damaged):
    """A file of CRIU's is missing or is not what its name says."""


@dataclass(frozen=True)
class DumpedMount:
    """A mount as a restore will make it. `key` is what an external one must be offered under, "" for others."""

    destination: str
    type: str
    key: str = ""
    root: str = "/"
    id: int = 0
    parent: int = 0


@dataclass(frozen=True)
class DumpStats:
    """What CRIU says of a dump: the time that the processes stood still, and the memory that it wrote, in pages."""

    frozen_ms: int
    pages_scanned: int
    pages_written: int


def processes(directory: Path, *, page_size: int = 4096) -> tuple[Process, ...]:
    """Return the processes in the images, in CRIU's order: parents come before their children.

    `page_size` is the dumping machine's. Raises CriuImageInvalid.
    """
    found = []
    for entry in _entries(directory / "pstree.img", PSTREE, criu.Process):
        core = next(_entries(directory / f"core-{entry.pid}.img", CORE, criu.Core), None)
        if core is None:
            raise CriuImageInvalid(f"{directory / f'core-{entry.pid}.img'}: empty")
        found.append(Process(entry.pid, core.task.name, memory_pages(directory, entry.pid) * page_size))
    return tuple(found)


def memory_pages(directory: Path, pid: int) -> int:
    """Return how many pages of the process are in the images; 0 for one that was dead already."""
    path = directory / f"pagemap-{pid}.img"
    if not path.exists():
        return 0
    entries = _entries(path, PAGEMAP, criu.Pagemap, head=1)
    return sum(entry.pages or entry.short_pages for entry in entries)


def mounts(directory: Path) -> tuple[DumpedMount, ...]:
    """Return the mounts in the images, of every mount namespace, the root itself left out. Raises CriuImageInvalid."""
    found = []
    for path in sorted(directory.glob("mountpoints-*.img")):
        for entry in _entries(path, MOUNTS, criu.Mount):
            kind = entry.type_name or TYPES.get(entry.type, f"type {entry.type}")
            mount = DumpedMount(entry.mountpoint or "/", kind, entry.key, entry.root, entry.id, entry.parent)
            if mount.destination != "/":
                found.append(mount)
    return tuple(found)


def has_internet_sockets(directory: Path) -> bool:
    """Tell whether a process holds a TCP or UDP socket, of whatever state. Raises CriuImageInvalid."""
    return any(entry.type == INTERNET_SOCKET for entry in _entries(directory / "files.img", FILES, criu.File))


def plugins(directory: Path) -> tuple[str, ...]:
    """Return CRIU's plugins that took part in the dump: a restore needs the same ones. Raises CriuImageInvalid."""
    entry = next(_entries(directory / "inventory.img", INVENTORY, criu.Inventory, service=None), None)
    return tuple(entry.plugins.names) if entry else ()


def stats(path: Path) -> DumpStats:
    """Read CRIU's `stats-dump`, which it leaves in the work directory. Raises CriuImageInvalid."""
    entry = next(_entries(path, STATS, criu.Stats, service=SERVICE), None)
    if entry is None:
        raise CriuImageInvalid(f"{path}: empty")
    return DumpStats(entry.dump.frozen_us // 1000, entry.dump.pages_scanned, entry.dump.pages_written)


def _entries(path: Path, magic: int, kind: type[M], *, head: int = 0, service: int | None = COMMON) -> Iterator[M]:
    """Yield the entries of a file after its first `head` ones; `service` is the magic number before its own."""
    expected = (magic,) if service is None else (service, magic)
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise CriuImageInvalid(f"{path}: {error.strerror}") from error
    offset = 4 * len(expected)
    if len(content) < offset or struct.unpack_from(f"<{len(expected)}I", content) != expected:
        raise CriuImageInvalid(f"{path}: not the CRIU image that its name says")
    while offset < len(content):
        if len(content) < offset + 4:
            raise CriuImageInvalid(f"{path}: ends in the middle of an entry's length")
        (length,) = struct.unpack_from("<I", content, offset)
        offset += 4
        if length > LONGEST or offset + length > len(content):
            raise CriuImageInvalid(f"{path}: ends in the middle of an entry of {length} bytes")
        if head == 0:
            yield _parse(path, kind, content[offset : offset + length])
        head = max(0, head - 1)
        offset += length


def _parse(path: Path, kind: type[M], data: memoryview) -> M:
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise CriuImageInvalid(f"{path}: {error}") from error
    return message

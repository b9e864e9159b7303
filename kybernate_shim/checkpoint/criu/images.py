"""Reads CRIU's image files: which processes, how much memory, which mounts, what a dump cost.

Each file begins with one or two magic numbers; then come entries, each a length in 32 bits, little endian, and a
protobuf message. Only what can be said before a restore is read; CRIU alone interprets the rest. Files may come from
anywhere, so only regular ones are read, and their sizes and numbers have limits; `confined` reads those of an image
that is to be restored in a separate process.
Source: criu.org, "Images"; CRIU's criu/include/magic.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kybernate_shim.checkpoint.image.manifest import ImageProcess
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.mount.syscalls import MS_RDONLY
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.messages import criu_pb2 as criu

COMMON: Final = 0x54564319
SERVICE: Final = 0x55105940
INVENTORY: Final = 0x58313116
PSTREE: Final = 0x50273030
CORE: Final = 0x55053847
PAGEMAP: Final = 0x56084025
FILES: Final = 0x56303138
IDS: Final = 0x54432030
MOUNTS: Final = 0x55563928
STATS: Final = 0x57093306
INTERNET_SOCKET: Final = 4
LONGEST: Final = 4 << 20  # bytes of one entry; more is a damaged length
MOST_BYTES: Final = 64 << 20  # of a file; those of pages and of their places are the only large ones
MOST_ENTRIES: Final = 1 << 20
MOST_PROCESSES: Final = 1 << 16
MOST_MOUNTS: Final = 1 << 14  # in all namespaces of a container
MOST_NAMESPACES: Final = 1 << 10
LONGEST_PATH: Final = 4096
BUFFER: Final = 64 << 10

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


@dataclass(frozen=True)
class DumpedMount:
    """A mount as a restore will make it. `key` is what an external one must be offered under, "" for others."""

    destination: str
    type: str
    key: str = ""
    root: str = "/"
    id: int = 0
    parent: int = 0
    writable: bool = True
    device: int = 0


@dataclass(frozen=True)
class DumpStats:
    """What CRIU says of a dump: the time that the processes were frozen, and the memory that it wrote, in pages."""

    frozen_ms: int
    pages_scanned: int
    pages_written: int


def processes(directory: Path, *, page_size: int = 4096) -> tuple[ImageProcess, ...]:
    """Return the processes in the images, in CRIU's order: parents come before their children.

    `page_size` is the dumping machine's. Raises Damaged.
    """
    found = []
    for entry in entries(directory / "pstree.img", PSTREE, criu.Process):
        core = next(entries(directory / f"core-{entry.pid}.img", CORE, criu.Core), None)
        if core is None:
            raise Damaged(f"{directory / f'core-{entry.pid}.img'}: empty")
        found.append(ImageProcess(entry.pid, core.task.name, memory_pages(directory, entry.pid) * page_size))
    return tuple(found)


def memory_pages(directory: Path, pid: int) -> int:
    """Return how many pages of the process are in the images; 0 for one that was dead already."""
    path = directory / f"pagemap-{pid}.img"
    if not path.exists():
        return 0
    found = entries(path, PAGEMAP, criu.Pagemap, head=1, most=None, most_bytes=None)
    return sum(entry.pages or entry.short_pages for entry in found)


def mounts(directory: Path) -> tuple[DumpedMount, ...]:
    """Return the mounts in the images, of every mount namespace, the root itself left out. Raises Damaged."""
    found: list[DumpedMount] = []
    for path in _mount_files(directory):
        for entry in entries(path, MOUNTS, criu.Mount, most=MOST_MOUNTS):
            kind = entry.type_name or TYPES.get(entry.type, f"type {entry.type}")
            writable = not entry.flags & MS_RDONLY  # what CRIU gives the mount, whatever its filesystem is
            place = entry.mountpoint or "/"
            mount = DumpedMount(place, kind, entry.key, entry.root, entry.id, entry.parent, writable, entry.device)
            if max(map(len, (mount.destination, kind, mount.key, mount.root))) > LONGEST_PATH:
                raise Damaged(f"{path}: a mount with a path of more than {LONGEST_PATH} characters")
            if len(found) == MOST_MOUNTS:
                raise Damaged(f"{path}: more than {MOST_MOUNTS} mounts with those of the other namespaces")
            if mount.destination != "/":
                found.append(mount)
    return tuple(found)


def root_writable(directory: Path) -> bool:
    """Return whether a root filesystem in the images is mounted for writing. Raises Damaged."""
    files = (entries(path, MOUNTS, criu.Mount, most=MOST_MOUNTS) for path in _mount_files(directory))
    return any(entry.mountpoint in ("", "/") and not entry.flags & MS_RDONLY for file in files for entry in file)


def foreign_roots(directory: Path) -> frozenset[int]:
    """Return the ids of mounts that are the root of a process and not the container's root filesystem, or a part of it.

    A program may have made a mount namespace with another root. Raises Damaged.
    """
    first = next(iter(pids(directory)), 0)
    own = next(entries(directory / f"ids-{first}.img", IDS, criu.Kernel), criu.Kernel())
    files = _mount_files(directory)
    roots = {
        path.name: [one for one in entries(path, MOUNTS, criu.Mount, most=MOST_MOUNTS) if one.mountpoint in ("", "/")]
        for path in files
    }
    known = {(one.device, one.root) for one in roots.get(f"mountpoints-{own.mount}.img", ())}
    return frozenset(one.id for found in roots.values() for one in found if (one.device, one.root) not in known)


def _mount_files(directory: Path) -> list[Path]:
    found = sorted(islice(directory.glob("mountpoints-*.img"), MOST_NAMESPACES + 1))
    if len(found) > MOST_NAMESPACES:
        raise Damaged(f"{directory}: mounts of more than {MOST_NAMESPACES} namespaces")
    return found


def pids(directory: Path) -> tuple[int, ...]:
    """Return the pids of all processes in the images, parents before their children. Raises Damaged."""
    return tuple(entry.pid for entry in entries(directory / "pstree.img", PSTREE, criu.Process, most=MOST_PROCESSES))


def has_internet_sockets(directory: Path) -> bool:
    """Return whether a process holds a TCP or UDP socket, of whatever state. Raises Damaged."""
    return any(entry.type == INTERNET_SOCKET for entry in entries(directory / "files.img", FILES, criu.File))


def stats(path: Path) -> DumpStats:
    """Read CRIU's `stats-dump`, which it leaves in the work directory. Raises Damaged."""
    entry = next(entries(path, STATS, criu.Stats, service=SERVICE), None)
    if entry is None:
        raise Damaged(f"{path}: empty")
    return DumpStats(entry.dump.frozen_us // 1000, entry.dump.pages_scanned, entry.dump.pages_written)


def entries(
    path: Path,
    magic: int,
    kind: type[M],
    *,
    head: int = 0,
    service: int | None = COMMON,
    most: int | None = MOST_ENTRIES,
    most_bytes: int | None = MOST_BYTES,
) -> Iterator[M]:
    """Yield the entries of the regular file `path` after its first `head` ones, one at a time in memory.

    `service` is the magic number before its own. More than `most` entries or `most_bytes` bytes are refused; None is
    for files of any size, such as the lists of a process's pages. Raises Damaged.
    """
    expected = (magic,) if service is None else (service, magic)
    try:
        # The descriptor belongs to the stream, which closes it.
        with os.fdopen(open_plain(path, most=most_bytes), "rb", buffering=BUFFER) as stream:
            if stream.read(4 * len(expected)) != struct.pack(f"<{len(expected)}I", *expected):
                raise Damaged(f"{path}: not the CRIU image that its name indicates")
            for number, data in enumerate(_cut(path, stream)):
                if most is not None and number >= most + head:
                    raise Damaged(f"{path}: more than {most} entries")
                if number >= head:
                    yield _parse(path, kind, data)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error


def _cut(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of each entry that follows in `stream`."""
    while head := stream.read(4):
        if len(head) < 4:
            raise Damaged(f"{path}: ends in the middle of an entry's length")
        (length,) = struct.unpack("<I", head)
        data = stream.read(length) if length <= LONGEST else b""
        if len(data) < length:
            raise Damaged(f"{path}: ends in the middle of an entry of {length} bytes")
        yield data


def _parse(path: Path, kind: type[M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except (DecodeError, RuntimeError) as error:
        raise Damaged(f"{path}: {error}") from error
    return message

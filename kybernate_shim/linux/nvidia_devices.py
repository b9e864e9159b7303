"""Which mappings and descriptors of a process are files of NVIDIA's devices.

A file is judged by its device's number, never by its name: a process can give any file the name of a device. The kernel
lists the numbers in /proc/devices.
Sources: proc(5), /proc/PID/map_files; the majors that NVIDIA's kernel modules register, whose names begin with
"nvidia"; the driver's open kernel module, kernel-open/nvidia/nv-mmap.c (host memory is mapped by the control device).
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.statx import status_of

DEVICES: Final = Path("/proc/devices")
DRIVER: Final = "nvidia"
CONTROL_MINOR: Final = 255  # /dev/nvidiactl
SECTIONS: Final = {"Character devices:": stat.S_IFCHR, "Block devices:": stat.S_IFBLK}
LOOK_SECONDS: Final = 30.0

T = TypeVar("T")
Majors = frozenset[tuple[int, int]]  # the kind of a device file (S_IFCHR, S_IFBLK) and its major number


@dataclass(frozen=True)
class Mapping:
    """Addresses in bytes; `host` says that it is host memory, such as pinned memory, and not the device's own."""

    start: int
    size: int
    perms: str
    host: bool = False

    @property
    def readable_host(self) -> bool:
        return self.host and self.perms.startswith("r")


@dataclass(frozen=True)
class DeviceFiles:
    """What one process holds: its mappings, and the numbers of its descriptors."""

    pid: int
    mappings: tuple[Mapping, ...] = ()
    descriptors: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.mappings or self.descriptors)

    @property
    def host_bytes(self) -> int:
        """Host memory that can be read."""
        return sum(one.size for one in self.mappings if one.readable_host)

    def __str__(self) -> str:
        return f"{len(self.mappings)} mappings and {len(self.descriptors)} descriptors of NVIDIA's devices"


def majors(text: str) -> Majors:
    """Return the numbers of NVIDIA's devices, from the text of /proc/devices."""
    found, kind = set(), 0
    for line in text.splitlines():
        kind = SECTIONS.get(line.strip(), kind)
        number, _, name = line.strip().partition(" ")
        if number.isdecimal() and name.strip().startswith(DRIVER):
            found.add((kind, int(number)))
    return frozenset(found)


def node_majors() -> Majors:
    """Return those of this machine, none where there is no driver."""
    return majors(DEVICES.read_text())


def look_all(pids: Iterable[int], wanted: Majors, *, seconds: float = LOOK_SECONDS) -> list[DeviceFiles]:
    """Return what each of `pids` holds of the `wanted` devices, without those that hold nothing or have ended.

    Raises TimeoutError after `seconds`.
    """
    until = time.monotonic() + seconds
    return [found for pid in pids if wanted and (found := look(pid, wanted, until=until))]


def look(pid: int, wanted: Majors, *, until: float = math.inf) -> DeviceFiles:
    """Return what a process holds of the `wanted` devices; nothing where it has ended.

    Raises TimeoutError at `until`, a moment of the monotonic clock: a process may have a million files open.
    """
    try:
        mappings = tuple(_in_time(_mappings(pid, wanted), pid, until))
        return DeviceFiles(pid, mappings, frozenset(_in_time(_descriptors(pid, wanted), pid, until)))
    except (FileNotFoundError, ProcessLookupError):
        return DeviceFiles(pid)


def _in_time(found: Iterator[T | None], pid: int, until: float) -> Iterator[T]:
    for one in found:
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} has too many files open or mapped to examine them in time")
        if one is not None:
            yield one


def _mappings(pid: int, wanted: Majors) -> Iterator[Mapping | None]:
    """Yield a mapping for each of the wanted devices, and None for each that is of something else."""
    known: dict[tuple[int, int], int] = {}  # the device's number of each file, -1 for what is none of the wanted
    for region in read_maps(pid):
        if region.inode and region.name.startswith("/"):
            file = region.device, region.inode
            if file not in known:
                known[file] = _number(f"/proc/{pid}/map_files/{region.start:x}-{region.end:x}", wanted)
            yield _mapping(region, known[file]) if known[file] >= 0 else None


def _mapping(region: Region, number: int) -> Mapping:
    return Mapping(region.start, region.size, region.perms, os.minor(number) == CONTROL_MINOR)


def _descriptors(pid: int, wanted: Majors) -> Iterator[int | None]:
    """Yield the number of each descriptor of a wanted device, and None for each other one."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            yield int(entry.name) if _number(entry.path, wanted) >= 0 else None


def _number(path: str, wanted: Majors) -> int:
    """Return the number of the device that `path` leads to, if it is one of the wanted; else -1.

    It may lead to a filesystem whose server does not answer. The look must not wait for that, least of all while the
    driver has the container locked.
    """
    try:
        found = status_of(path)
        mode, device = found.st_mode, found.st_rdev
    except OSError:
        return -1  # closed or unmapped while we looked
    return device if (stat.S_IFMT(mode), os.major(device)) in wanted else -1

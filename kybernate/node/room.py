"""Whether a directory can be written to: read-only mounts, full filesystems, inodes that have run out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate.node.filesystem import nearest_existing
from kybernate.node.finding import HealthFinding

FULL_BYTES: Final = 64 << 20  # with less, programs fail that write a few records
SHORT: Final = 0.05  # of the filesystem


@dataclass(frozen=True)
class Room:
    """The filesystem of a directory. `inodes` is None where it does not count them. `problem`: why it is unknown."""

    name: str
    path: Path
    total: int = 0
    free: int = 0
    inodes: int | None = None
    readonly: bool = False
    problem: str = ""


def room_of(name: str, path: Path) -> Room:
    """Look at the filesystem that a directory is on, or will be on."""
    try:
        found = os.statvfs(nearest_existing(path))
    except OSError as error:
        return Room(name, path, problem=error.strerror or str(error))
    return Room(
        name,
        path,
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_favail if found.f_files else None,
        bool(found.f_flag & os.ST_RDONLY),
    )


def findings(rooms: Iterable[Room]) -> Iterator[HealthFinding]:
    """Yield one finding for each directory."""
    for one in rooms:
        yield _finding(one)


def _finding(one: Room) -> HealthFinding:
    free = f"{one.path}: {one.free / 2**30:.1f} GiB free"
    if one.problem:
        return HealthFinding(one.name, "note", f"{one.path}: {one.problem}", "run as root")
    if one.readonly:
        advice = "`mount -o remount,rw` of its filesystem; `dmesg` shows why the kernel closed it"
        return HealthFinding(one.name, "bad", f"{one.path} is mounted read-only", advice)
    if one.free < FULL_BYTES:
        return HealthFinding(one.name, "bad", f"{one.path} is full: {one.free >> 20} MiB free", "make room there")
    if one.inodes == 0:
        return HealthFinding(one.name, "bad", f"{one.path} has no free inodes", "remove small files there")
    if one.free < one.total * SHORT:
        return HealthFinding(one.name, "note", f"{free}, {one.free / one.total:.0%}", "make room before it is full")
    return HealthFinding(one.name, "ok", free)

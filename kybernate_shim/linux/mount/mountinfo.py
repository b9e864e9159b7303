"""What is mounted where: /proc/<pid>/mountinfo as objects. Source: proc(5), "/proc/pid/mountinfo"."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate_shim.linux.descriptors import mount_of

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})  # types of filesystems


@dataclass(frozen=True)
class MountPoint:
    """One line of mountinfo. `root` is the part of the filesystem that is visible at `path`."""

    id: int
    parent: int
    device: str
    root: str
    path: Path
    options: tuple[str, ...]
    propagation: tuple[str, ...]
    type: str
    source: str
    super_options: tuple[str, ...]


def read_mountinfo(pid: int | str = "self") -> list[MountPoint]:
    """Return the mounts of the namespace of `pid`, in the kernel's order. Raises OSError when the process is gone."""
    return [parse_line(line) for line in _lines(pid)]


def read_cgroup_mounts() -> list[MountPoint]:
    """Return our mounts of cgroup hierarchies, of either version: a few among at least one mount for each container."""
    return [parse_line(line) for line in _lines("self") if b" - cgroup" in line]


def mount_at(path: Path) -> MountPoint | None:
    """Return the mount that a file or directory is on; None where our namespace does not have it. Raises OSError."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        prefix = b"%d " % mount_of(f"/proc/self/fdinfo/{fd}")
    finally:
        os.close(fd)
    return next((parse_line(line) for line in _lines("self") if line.startswith(prefix)), None)


def below(path: Path, mounts: Iterable[MountPoint] | None = None) -> list[MountPoint]:
    """Return the mounts at `path` and in the tree under it, in the order in which they can be unmounted.

    `path` is resolved except for its last component, which is what umount acts upon.
    """
    real = path.parent.resolve() / path.name
    if mounts is None:
        mounts = (parse_line(line) for line in _lines("self") if _is_beneath(line, os.fsencode(real)))
    found = [mount for mount in mounts if mount.path.is_relative_to(real)]
    # Deepest first; of mounts stacked on one directory the topmost, which the kernel lists last.
    found.reverse()
    return sorted(found, key=lambda mount: -len(mount.path.parts))


def parse_line(line: bytes) -> MountPoint:
    """Parse one line. Fields are separated by single spaces, and the source may be empty."""
    before, _, after = line.partition(b" - ")
    id_, parent, device, root, path, options, *propagation = before.split(b" ")
    type_, source, super_options = after.split(b" ", 2)
    return MountPoint(
        id=int(id_),
        parent=int(parent),
        device=device.decode(),
        root=unescape(root),
        path=Path(unescape(path)),
        options=_words(options),
        propagation=tuple(word.decode() for word in propagation),
        type=unescape(type_),
        source=unescape(source),
        super_options=_words(super_options),
    )


def unescape(field: bytes) -> str:
    """Replace the kernel's octal escapes (space, tab, newline, backslash, #) by their bytes."""
    if b"\\" in field:
        field = re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), field)
    return os.fsdecode(field)


def _lines(pid: int | str) -> list[bytes]:
    return [line for line in Path(f"/proc/{pid}/mountinfo").read_bytes().split(b"\n") if line]


def _is_beneath(line: bytes, path: bytes) -> bool:
    """Return whether a line may be of a mount at `path` or below, before the cost of parsing it."""
    place = line.split(b" ", 5)[4]
    return b"\\" in place or place.startswith(path)


def _words(field: bytes) -> tuple[str, ...]:
    return tuple(unescape(word) for word in field.split(b","))

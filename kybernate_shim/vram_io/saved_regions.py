"""What is known of a saved region, for the image's manifest."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.statx import status_of
from kybernate_shim.vram_io.image_files import SavedMemory, VramFile

FILES = "kybernate-vram-*.bin"
SHARED = "rw-s"


@dataclass(frozen=True)
class SavedRegion(SavedMemory):
    """A region of a process in a file of the image, or a part of one.

    For a part, `offset` says where it begins in the region's file, and `digest` is that of the part. `copied` says that
    the driver wrote into another file, which a process still had open.
    """

    offset: int | None = None
    copied: bool = False

    @classmethod
    def of(cls, file: VramFile) -> SavedRegion:
        return cls(*_saved_memory(file))

    def in_image(self, pid: int) -> VramFile:
        """Return the whole region as the manifest lists it; `pid` is the container's."""
        return VramFile(pid, *_saved_memory(self))

    @property
    def end(self) -> int:
        return self.start + self.size


def _saved_memory(saved: SavedMemory) -> tuple[str, int, int, int, str]:
    return saved.file, saved.start, saved.size, saved.data_bytes, saved.digest


def mapped_files(pids: Iterable[int], directory: Path) -> dict[int, SavedRegion]:
    """Return, by process, the file of `directory` that it has mapped as shared memory, wholly, without its digest."""
    files = {(status.st_dev, status.st_ino): (file.name, status.st_size) for file, status in _looked_at(directory)}
    found = {}
    for pid in pids if files else ():
        for one in _maps(pid):
            name, size = files.get((one.device, one.inode), ("", 0))
            if one.perms == SHARED and name and one.size == size:
                found[pid] = SavedRegion(name, one.start, size, size, "")
    return found


def is_mapped(pids: Iterable[int], file: os.stat_result) -> bool:
    """Return whether one of the processes has any of a file mapped."""
    return any((one.device, one.inode) == (file.st_dev, file.st_ino) for pid in pids for one in _maps(pid))


def give_up(pids: Iterable[int], directory: Path) -> None:
    """Remove the files of `directory`, with their memory unless one of the processes has that mapped.

    Another process may still have a descriptor, which keeps the file alive.
    """
    for file, status in _looked_at(directory):
        if stat.S_ISREG(status.st_mode) and not is_mapped(pids, status):
            os.truncate(file, 0)
        file.unlink()


def open_files(pid: int, directory: Path) -> list[int]:
    """Return the descriptors that a process has of the files of `directory`."""
    files = [status for _, status in _looked_at(directory)]
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir() if files else ():
            with suppress(OSError):  # it has closed that one
                status = status_of(str(descriptor))
                if any((status.st_dev, status.st_ino) == (one.st_dev, one.st_ino) for one in files):
                    found.append(int(descriptor.name))
    return found


def _looked_at(directory: Path) -> list[tuple[Path, os.stat_result]]:
    return [(file, file.lstat()) for file in directory.glob(FILES)]


def _maps(pid: int) -> list[Region]:
    try:
        return read_maps(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended


def file_name(pid: int, number: int) -> str:
    """Return the name of the file for region `number` of a process, `pid` as seen in the container."""
    return f"kybernate-vram-{pid}-{number}.bin"


def total_bytes(saved: Iterable[SavedRegion]) -> int:
    return sum(region.size for region in saved)

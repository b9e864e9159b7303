"""What is known of a saved region, for the image's manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.memory import read_maps

FILES = "kybernate-vram-*.bin"
SHARED = "rw-s"


@dataclass(frozen=True)
class SavedRegion:
    """A region of a process in a file of the image.

    Addresses and sizes in bytes. The file is as long as the region; what is zero in it may be a hole, and `data_bytes`
    is the rest. `digest` is what `digest.of_file` gives for the file. Of a part of a region, `offset` says where it
    begins in the region's file, and `digest` is the part's.
    """

    file: str
    start: int
    size: int
    data_bytes: int
    digest: str
    offset: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.size


def mapped_files(pids: Iterable[int], directory: Path) -> dict[int, SavedRegion]:
    """Return, by process, the file of `directory` that it has mapped as shared memory, without its digest."""
    files = {file.stat().st_ino: file for file in directory.glob(FILES)}
    found = {}
    for pid in pids if files else ():
        try:
            maps = read_maps(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        for one in maps:
            if one.perms == SHARED and one.inode in files:
                found[pid] = SavedRegion(files[one.inode].name, one.start, one.size, one.size, "")
    return found


def file_name(pid: int, number: int) -> str:
    """Return the name of the file for region `number` of a process, `pid` as seen in the container."""
    return f"kybernate-vram-{pid}-{number}.bin"


def total_bytes(saved: Iterable[SavedRegion]) -> int:
    return sum(region.size for region in saved)

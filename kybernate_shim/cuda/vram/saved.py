"""What is known of a saved region, for the image's manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FILES = "kybernate-vram-*.bin"


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


def file_name(pid: int, number: int) -> str:
    """Return the name of the file for region `number` of a process, `pid` as seen in the container."""
    return f"kybernate-vram-{pid}-{number}.bin"


def total_bytes(saved: Iterable[SavedRegion]) -> int:
    return sum(region.size for region in saved)

"""An image's directory as something to be stored: which files, in which order, cut where."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kybernate.store.format.chunks import Pages, cuts, cuts_by_address
from kybernate_shim.checkpoint.criu.images import PAGEMAP, entries
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.errors import Damaged
from kybernate_shim.messages import criu_pb2 as criu


class ImageFile(Protocol):
    """A file of an image that can be read in any order, from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def cuts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (offset, bytes, hole) of its chunks, in order and without gaps; `hole` is known to be zeros."""

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of it."""


@dataclass(frozen=True)
class DiskFile:
    """A file in a directory. `runs` are the pages that it holds, where it is one of CRIU's pages files."""

    path: Path
    size: int
    runs: tuple[Pages, ...] = ()
    _descriptor: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.path.name

    def cuts(self) -> Iterator[tuple[int, int, bool]]:
        data = _Data(self._open(), self.size)
        for offset, size in cuts_by_address(self.size, self.runs) if self.runs else cuts(self.size):
            yield offset, size, not data.touches(offset, offset + size)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._open(), size, offset)

    def _open(self) -> int:
        if not self._descriptor:
            self._descriptor.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        return self._descriptor[0]

    def close(self) -> None:
        while self._descriptor:
            os.close(self._descriptor.pop())


class _Data:
    """Which parts of a file hold data, asked in rising order."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size = descriptor, size
        self._begin = self._end = 0

    def touches(self, start: int, end: int) -> bool:
        """Return whether there is data between `start` and `end`."""
        while self._end <= start and self._end < self._size:
            try:
                self._begin = os.lseek(self._descriptor, start, os.SEEK_DATA)
                self._end = os.lseek(self._descriptor, self._begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    return True  # a filesystem that does not know: all is data
                self._begin = self._end = self._size  # no data from here on
        return self._begin < end and self._end > start


def files_of(directory: Path, manifest: Manifest) -> tuple[DiskFile, ...]:
    """Return the files of an image in the order in which a restore needs them: CRIU's own, then those with VRAM."""
    moved = {file.file for file in manifest.moved_files}
    runs = {} if manifest.encryption else _runs(directory)
    ordered = sorted(manifest.stored_files, key=lambda file: (file.name.removesuffix(".enc") in moved, file.name))
    return tuple(DiskFile(directory / file.name, file.size, runs.get(file.name, ())) for file in ordered)


def _runs(directory: Path) -> dict[str, tuple[Pages, ...]]:
    """Return which pages each of CRIU's pages files holds. What cannot be read is cut by offsets."""
    found: dict[str, tuple[Pages, ...]] = {}
    for path in sorted(directory.glob("pagemap-*.img")):
        try:
            head = next(entries(path, PAGEMAP, criu.PagemapHead, most=None, most_bytes=None))
            maps = entries(path, PAGEMAP, criu.Pagemap, head=1, most=None, most_bytes=None)
            runs = tuple(Pages(one.address, one.pages or one.short_pages) for one in maps)
        except (Damaged, StopIteration):
            continue
        found[f"pages-{head.pages_id}.img"] = runs
    return found

"""An image that is open for reading: its directory by a descriptor, its files by their places in the manifest.

A file is named by a number, so nothing that a reader sends is ever part of a path. The directory is locked, together
with other readers: a removal locks it alone, or is refused. All of this blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, File, Manifest, ManifestInvalid, decode
from kybernate_shim.linux.locks import try_lock_directory
from kybernate_shim.linux.plain_files import open_plain, read_plain

LEAST_HOLE: Final = 1 << 20  # bytes; smaller ones are sent as zeros
MOST_HOLES: Final = 10_000  # of an image, so that its description stays small

Extent = tuple[int, int]  # offset, bytes

IMAGE_UNREADABLE_ADVICE: Final = "`kybernate images` on the node that has the image shows what is wrong with it"


@dataclass(frozen=True)
class OpenedImage:
    """An image by the descriptor of its directory. `files` are its stored files, in the manifest's order."""

    directory: Path
    content: bytes
    manifest: Manifest
    files: tuple[File, ...]
    _descriptor: int

    @classmethod
    def of(cls, directory: Path) -> OpenedImage:
        """Open an image. Raises Failure."""
        try:
            descriptor = try_lock_directory(directory, shared=True)
        except OSError as error:
            raise Failure(f"{directory} cannot be opened: {error.strerror}", advice=IMAGE_UNREADABLE_ADVICE) from error
        if descriptor is None:
            raise Failure(f"{directory} is being removed", state="nothing was opened", advice=IMAGE_UNREADABLE_ADVICE)
        try:
            content = read_plain(NAME, directory=descriptor, most=MOST_BYTES)
            manifest = decode(content)
        except (OSError, ManifestInvalid) as error:
            os.close(descriptor)
            raise Failure(f"{directory} is not a complete image: {error}", advice=IMAGE_UNREADABLE_ADVICE) from error
        return cls(directory, content, manifest, manifest.stored_files, descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def file(self, number: int) -> Iterator[int]:
        """Give a descriptor of a file, which has the manifest's size. Raises Failure."""
        file = self.files[number]
        try:
            descriptor = open_plain(file.name, directory=self._descriptor)
        except OSError as error:
            raise Failure(
                f"{self.directory / file.name} cannot be read: {error.strerror}", advice=IMAGE_UNREADABLE_ADVICE
            ) from error
        try:
            if (found := os.fstat(descriptor).st_size) != file.size:
                raise Failure(
                    f"{self.directory / file.name} has {found} bytes, and {file.size} in the manifest",
                    advice=IMAGE_UNREADABLE_ADVICE,
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def holes(self) -> list[list[Extent]]:
        """Return the large holes of each file. Raises Failure."""
        left, found = MOST_HOLES, []
        for number, file in enumerate(self.files):
            with self.file(number) as descriptor:
                holes = [hole for hole in _holes(descriptor, file.size) if hole[1] >= LEAST_HOLE][:left]
            left -= len(holes)
            found.append(holes)
        return found


def _holes(descriptor: int, size: int) -> Iterator[Extent]:
    end = 0
    while end < size:
        try:
            data = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return  # a filesystem that does not know
            data = size  # no data from here on
        if data > end:
            yield end, data - end
        end = os.lseek(descriptor, data, os.SEEK_HOLE) if data < size else size

"""Layers of an exported image: which files share one, and a layer as a stream with its digests.

A large file has a layer of its own: files of VRAM that did not change since another checkpoint are then the same layer,
which an image registry keeps and receives once. The number of layers stays far below what overlay mounts take.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Protocol

from kybernate.export.documents import LAYER, Descriptor
from kybernate.export.entries import Entry, described, payload
from kybernate.export.tar_stream import archive_bytes, archived
from kybernate_shim.checkpoint.image.store import Image

ALONE = 64 << 20  # bytes of a file that has a layer of its own
MOST_ALONE = 32  # layers of one file
GZIP_WINDOW = 31  # zlib's word for a gzip header, without a time
MOST_THREADS = 4  # of zstd; one number would not do for all nodes, and does not change the result


class Compression(StrEnum):
    """How a layer is compressed; an encrypted image never is, because nothing of it becomes smaller."""

    ZSTD = "zstd"
    GZIP = "gzip"
    NONE = "none"


LEVELS = {Compression.ZSTD: 3, Compression.GZIP: 1, Compression.NONE: 0}


@dataclass(frozen=True)
class Layer:
    """Entries that travel together."""

    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """The size of its archive."""
        return archive_bytes(self.entries)


def layers_of(image: Image) -> tuple[Layer, ...]:
    """Return the layers: first what describes the image, with its manifest, then its files."""
    files = payload(image)
    return (Layer(described(image)), *grouped(files, threshold(sum(file.size for file in files))))


def threshold(total: int) -> int:
    """Return from which size on a file of an image of `total` bytes has a layer of its own."""
    return max(ALONE, total // MOST_ALONE)


def grouped(files: Sequence[Entry], alone: int) -> Iterator[Layer]:
    """Yield layers: the large files one by one, the others in groups of about `alone` bytes."""
    group: list[Entry] = []
    for file in files:
        if file.size >= alone:
            yield Layer((file,))
            continue
        if sum(one.size for one in group) + file.size > alone:
            yield Layer(tuple(group))
            group = []
        group.append(file)
    if group:
        yield Layer(tuple(group))


class Compressor(Protocol):
    """What zlib and zstandard have in common."""

    def compress(self, data: bytes | memoryview, /) -> bytes:
        """Take bytes and return what is ready."""

    def flush(self) -> bytes:
        """Return the rest."""


class LayerStream:
    """A layer as it is sent. `descriptor` and `diff_id` are there when it was read to its end."""

    def __init__(self, layer: Layer, compression: Compression, count: Callable[[int], object]) -> None:
        self._layer, self._compression, self._count = layer, compression, count
        self.descriptor: Descriptor | None = None
        self.diff_id = ""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        if self._compression == Compression.NONE:
            yield from self._plain()
        else:
            yield from self._compressed(compressor(self._compression))

    def _plain(self) -> Iterator[bytes | memoryview]:
        digest, size = sha256(), 0
        for piece in archived(self._layer.entries):
            digest.update(piece)
            size += len(piece)
            yield piece
            self._count(len(piece))
        self._finish(digest.hexdigest(), digest.hexdigest(), size)

    def _compressed(self, packer: Compressor) -> Iterator[bytes]:
        digest, plain, size = sha256(), sha256(), 0
        for piece in archived(self._layer.entries):
            plain.update(piece)
            if packed := packer.compress(piece):
                digest.update(packed)
                size += len(packed)
                yield packed
            self._count(len(piece))
        packed = packer.flush()
        digest.update(packed)
        yield packed
        self._finish(plain.hexdigest(), digest.hexdigest(), size + len(packed))

    def _finish(self, plain: str, digest: str, size: int) -> None:
        suffix = "" if self._compression == Compression.NONE else f"+{self._compression}"
        self.diff_id = f"sha256:{plain}"
        self.descriptor = Descriptor(f"{LAYER}{suffix}", f"sha256:{digest}", size)


def compressor(compression: Compression) -> Compressor:
    """Return a fresh compressor, whose result depends on what it is given alone."""
    if compression == Compression.GZIP:
        return zlib.compressobj(LEVELS[compression], zlib.DEFLATED, GZIP_WINDOW)
    import zstandard  # of the extra `oci`

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return zstandard.ZstdCompressor(level=LEVELS[compression], threads=threads).compressobj()

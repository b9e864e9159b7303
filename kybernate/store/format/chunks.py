"""Where files are cut into chunks, so that equal memory makes equal chunks in any image, replica and generation.

kybernate-vram-*, arena files   every 2 MiB: their offsets are those of VRAM's own pieces
pages-*.img of CRIU             where an address in the process's memory crosses a multiple of 2 MiB: a page more or
                                less moves all that follows in the file, and changes one chunk
all others                      every 2 MiB
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

CHUNK_BYTES = 2 << 20
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Pages:
    """A run of `count` pages that a pages-*.img file holds, and their address in memory."""

    address: int
    count: int


def cuts(size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the chunks of a file that is cut at multiples of CHUNK_BYTES."""
    for offset in range(0, size, CHUNK_BYTES):
        yield offset, min(CHUNK_BYTES, size - offset)


def cuts_by_address(size: int, runs: Iterable[Pages], *, page_bytes: int = PAGE_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the chunks of a file of pages, cut where their addresses cross a chunk's boundary.

    Neighbours in the file that lie in the same window of memory are one chunk. What the file has beyond the runs, or
    lacks, is cut by offsets: the pages' list is a hint for the boundaries, and never decides what is stored.
    """
    begin = offset = 0
    window: int | None = None
    for run in runs:
        address, left = run.address, run.count * page_bytes
        while left > 0 and offset < size:
            here = address // CHUNK_BYTES
            length = min(left, (here + 1) * CHUNK_BYTES - address, size - offset)
            if here != window or offset + length - begin > CHUNK_BYTES:
                if offset > begin:
                    yield begin, offset - begin
                begin, window = offset, here
            offset, address, left = offset + length, address + length, left - length
    if offset > begin:
        yield begin, offset - begin
    for rest, length in cuts(size - offset):
        yield offset + rest, length

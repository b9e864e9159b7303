"""Which memory of a process holds its VRAM after a CUDA checkpoint: found by comparing maps, never guessed by size.

The driver moves VRAM into private anonymous mappings that it makes for the purpose. So what appeared, or grew, between
the look before and the look after is the driver's; a mapping that was there before belongs to the program.
Source: measured on driver 580 (one mapping of about the size of the VRAM in use).
"""

from __future__ import annotations

from collections.abc import Iterable

from kybernate_shim.linux.process_memory import Region

SMALLEST_BYTES = 2 << 20  # below this, CRIU is as fast


def appeared(before: Iterable[Region], after: Iterable[Region]) -> list[Region]:
    """Return the private anonymous memory of `after` that nothing in `before` covered, from 2 MiB on.

    Where the kernel has merged a new mapping with a neighbour of the same kind, only the new part is returned.
    """
    old = sorted((region.start, region.end) for region in before)
    found = []
    for region in after:
        if region.private_anonymous:
            found += [
                region._replace(start=start, end=end)
                for start, end in _uncovered(region.start, region.end, old)
                if end - start >= SMALLEST_BYTES
            ]
    return found


def _uncovered(start: int, end: int, covers: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the parts of start..end that no interval of the sorted `covers` touches."""
    for low, high in covers:
        if high <= start or low >= end:
            continue
        if low > start:
            yield start, low
        start = max(start, high)
        if start >= end:
            return
    if start < end:
        yield start, end

"""Where in the arena bytes are: parts of it, and holes, which stand for zeros and take no part of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

HOLE = -1


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of the arena, in bytes from its start; with HOLE for a start, as many zeros."""

    start: int
    size: int

    @property
    def is_hole(self) -> bool:
        return self.start == HOLE

    @property
    def end(self) -> int:
        return self.start + self.size

    def cut(self, at: int) -> tuple[Extent, Extent]:
        """Return the first `at` bytes, and the rest."""
        rest = HOLE if self.is_hole else self.start + at
        return Extent(self.start, at), Extent(rest, self.size - at)


@dataclass(frozen=True, slots=True)
class Part:
    """Where the bytes at `offset` of a block are, or are to go."""

    offset: int
    extent: Extent


@dataclass(frozen=True)
class Kept:
    """Where the bytes of one block are: `index`, `address` and `size` are the block's, `extents` add up to its size.

    `marks` has the hash of each piece (see pieces.py), as the arena has it; empty where nothing was hashed.
    """

    index: int
    address: int
    size: int
    extents: tuple[Extent, ...]
    marks: bytes = b""


def parts(extents: Iterable[Extent], offset: int = 0) -> Iterator[Part]:
    """Yield `extents`, which follow each other in a block from `offset` on, as its parts."""
    for extent in extents:
        yield Part(offset, extent)
        offset += extent.size


def gaps(taken: Iterable[Extent], size: int) -> deque[Extent]:
    """Return what is not `taken`, holes among that, of `size` bytes."""
    found: deque[Extent] = deque()
    at = 0
    for extent in [*sorted((one for one in taken if not one.is_hole), key=lambda one: one.start), Extent(size, 0)]:
        if extent.start > at:
            found.append(Extent(at, extent.start - at))
        at = max(at, extent.end)
    return found


def without_end(extents: Iterable[Extent], size: int) -> deque[Extent]:
    """Return `extents` without the last `size` bytes of them; nothing where they are no more."""
    found = deque(extents)
    while size and found:
        last = found.pop()
        if last.size > size:
            found.append(last.cut(last.size - size)[0])
        size -= min(size, last.size)
    return found


def take(extents: deque[Extent], size: int) -> Iterator[Extent]:
    """Take `size` bytes from the front of `extents`, in place."""
    while size:
        extent = extents.popleft()
        if extent.size > size:
            extent, rest = extent.cut(size)
            extents.appendleft(rest)
        yield extent
        size -= extent.size


def joined(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Make one of neighbours that follow each other."""
    found: list[Extent] = []
    for extent in extents:
        last = found[-1] if found else None
        if last is not None and (extent.start == last.end if not last.is_hole else extent.is_hole):
            found[-1] = Extent(last.start, last.size + extent.size)
        else:
            found.append(extent)
    return tuple(found)


def total(extents: Iterable[Extent]) -> int:
    """Return how many bytes of the arena they take."""
    return sum(extent.size for extent in extents if not extent.is_hole)

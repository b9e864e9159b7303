"""Bytes of the arena that still arrive from an image: they are copied to a GPU as they arrive.

One process fills the blocks of a record in their order (`arena.records.Filler`). What it has not filled yet may be left
from another process, so nothing is read beyond what it reports as filled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from kybernate_shim.arena.extents import Kept, Part, parts
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.records import Record

PAUSE: Final = 0.001  # between two looks at what has come
PORTION: Final = 64 << 20  # bytes that are worth a copy, where they are not the last


def readable(record: Record) -> list[Kept]:
    """Return the blocks that are in the arena, or arrive there."""
    return record.kept if record.filler is None else [*record.kept, *record.pending]


@dataclass(frozen=True)
class _Stretch:
    """A part of block `number` of a batch; it begins `start` bytes after the first one that is filled."""

    start: int
    number: int
    part: Part


class Filling:
    """What of one record may be read."""

    def __init__(self, memory: Memory, record: Record, check: Callable[[], None]) -> None:
        """`check` is called again and again during a wait, and raises what is to end it."""
        self._memory = memory
        self._check = check
        self._filler = record.filler
        base = self._filler.base if self._filler is not None else 0
        starts = accumulate((one.size for one in record.pending), initial=base)
        self._starts = dict(zip(((one.index, one.address) for one in record.pending), starts, strict=False))

    def portions(self, batch: Sequence[Kept]) -> Iterator[list[list[Part]]]:
        """Yield parts of each block of `batch` as soon as they may be read, one after the other, until all are.

        Raises ArenaIncomplete, and what `check` raises.
        """
        if self._filler is None:
            yield [list(parts(one.extents)) for one in batch]
            return
        rest = deque(self._stretches(batch))
        while rest:
            end = self._filled(min(rest[0].start + PORTION, _end(rest[-1])))
            found: list[list[Part]] = [[] for _ in batch]
            while rest and rest[0].start < end:
                stretch = rest.popleft()
                if _end(stretch) > end:
                    stretch, later = _cut(stretch, end)
                    rest.appendleft(later)
                found[stretch.number].append(stretch.part)
            yield found

    def _stretches(self, batch: Sequence[Kept]) -> list[_Stretch]:
        found = [
            _Stretch(self._starts[one.index, one.address] + part.offset, number, part)
            for number, one in enumerate(batch)
            for part in parts(one.extents)
        ]
        return sorted(found, key=lambda stretch: stretch.start)

    def _filled(self, wanted: int) -> int:
        """Wait until so many bytes have arrived; return how many have by then."""
        assert self._filler is not None
        while (filled := self._memory.filled(self._filler.owner)) < wanted:
            self._check()
            time.sleep(PAUSE)
        return filled


def _end(stretch: _Stretch) -> int:
    return stretch.start + stretch.part.extent.size


def _cut(stretch: _Stretch, end: int) -> tuple[_Stretch, _Stretch]:
    """Return what is before `end`, and the rest."""
    size = end - stretch.start
    first, second = stretch.part.extent.cut(size)
    later = Part(stretch.part.offset + size, second)
    return replace(stretch, part=Part(stretch.part.offset, first)), _Stretch(end, stretch.number, later)

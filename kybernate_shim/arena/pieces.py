"""Which pieces of a block have to be copied, and which the arena has already, or needs not have: without any copying.

A block is hashed on its GPU in pieces, and compared with the hashes of what the arena still has of it. So a piece is
copied again only when it has changed. One that is all zeros is not copied at all, and takes no part of the arena.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from struct import iter_unpack

from kybernate_shim.arena.extents import HOLE, Extent, Kept, Part, joined, parts, take, total
from kybernate_shim.sizes import GRAIN

PIECE = GRAIN  # every block is a multiple of it, so that pieces take what is free
MARK = 16  # bytes of a piece's hash
RUNS = re.compile(rb"(.)\1*", re.DOTALL)
UNKNOWN = bytes(MARK)  # nothing is known of a piece's copy; a hash that happens to be this only costs a copy


class Fate(IntEnum):
    """What becomes of a piece."""

    ZERO = 0  # it is all zeros
    CHANGED = 1  # it has to be copied
    CLEAN = 2  # the arena has it


@dataclass(frozen=True)
class PieceHashes:
    """What a GPU says of a block's pieces: of each whether any bit is set, and its hash, MARK bytes.

    That is UNKNOWN where none is.
    """

    marks: bytes
    any: Sequence[int]


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Neighbouring pieces with the same fate: bytes of their block."""

    fate: Fate
    offset: int
    size: int


class BlockPlan:
    """What becomes of one block: what `stays` where it is, and how many `bytes` have which fate."""

    def __init__(self, block: tuple[int, int, int], seen: PieceHashes | None, copy: Kept | None) -> None:
        self.bytes = dict.fromkeys(Fate, 0)
        self.stays: list[Extent] = []
        self.changed: list[Part] = []
        self._block = block
        self._marks = seen.marks if seen is not None else b""
        self._places: list[tuple[PieceRun, list[Extent]]] = []
        places = deque(copy.extents if copy is not None else [Extent(HOLE, block[2])])
        for run in sort_out(block[2], seen, copy.marks if copy is not None else b""):
            self.bytes[run.fate] += run.size
            place = list(take(places, run.size))
            self._places.append((run, place))
            if run.fate is Fate.CLEAN:
                self.stays += place

    def settle(self, room: Callable[[int], Iterable[Extent]]) -> tuple[Kept, Kept]:
        """Have `room` give so many bytes of the arena, and list in `changed` what has to be copied there.

        Returns where the block is then, and the same without the hashes of what is not copied yet.
        """
        extents: list[Extent] = []
        trusted = bytearray(self._marks)
        for run, place in self._places:
            if run.fate is Fate.ZERO:
                place = [Extent(HOLE, run.size)]
            elif run.fate is Fate.CHANGED:
                place = list(room(run.size))
                self.changed += parts(place, run.offset)
                if trusted:
                    first, count = run.offset // PIECE * MARK, run.size // PIECE * MARK
                    trusted[first : first + count] = bytes(count)
            extents += place
        kept = Kept(*self._block, joined(extents), self._marks)
        return kept, replace(kept, marks=bytes(trusted))


def is_known(kept: Kept) -> bool:
    """Return whether there is a hash of everything that the arena has of a block."""
    known = sum(1 for (mark,) in iter_unpack(f"{MARK}s", kept.marks) if mark != UNKNOWN)
    return known * PIECE == total(kept.extents)


def sort_out(size: int, seen: PieceHashes | None, known: bytes) -> Iterator[PieceRun]:
    """Yield what becomes of a block of `size` bytes, from its start to its end.

    `known` are the hashes of what the arena has of it, by the same key; empty where it has nothing. Without `seen`, all
    of it is copied, and later changes to it cannot be detected.
    """
    if seen is None:
        yield PieceRun(Fate.CHANGED, 0, size)
        return
    known = known if len(known) == len(seen.marks) else bytes(len(seen.marks))
    for found in RUNS.finditer(_fates(seen, known)):
        yield PieceRun(Fate(found[0][0]), found.start() * PIECE, len(found[0]) * PIECE)


def _fates(seen: PieceHashes, known: bytes) -> bytes:
    """Return the fate of each piece; there are tens of thousands of them, while a process is frozen."""
    zero, changed, clean = map(int, Fate)
    unknown = (UNKNOWN,)
    marks = (iter_unpack(f"{MARK}s", all_marks) for all_marks in (seen.marks, known))
    return bytes(
        [
            zero if not bits else clean if now == then != unknown else changed
            for bits, now, then in zip(seen.any, *marks, strict=True)
        ]
    )


@dataclass(frozen=True)
class Update:
    """What `Memory.update` has found room for: all blocks, and the parts of each of them that have to be copied there.

    Of the blocks, `clean` bytes are there already, and `zero` bytes need not be. `kept` is true once all is copied, and
    believed once it is confirmed.
    """

    kept: list[Kept]
    key: bytes
    changed: list[list[Part]]
    clean: int
    zero: int

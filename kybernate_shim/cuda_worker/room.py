"""Room on a GPU that another process is giving up: memory is made there block by block, as room becomes free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kybernate_shim.arena.control import PLACEHOLDER_SIZES
from kybernate_shim.arena.extents import Kept
from kybernate_shim.cuda_worker.program_blocks import small_batches

PAUSE: Final = 0.001  # between two looks at what is free
PORTION: Final = 512 << 20  # bytes that are worth a wait; the link needs 10 ms for them


@dataclass(frozen=True)
class RoomWait:
    """`free` returns the free bytes of the GPU; more are expected within `seconds`, repeatedly."""

    free: Callable[[], int]
    seconds: float
    check: Callable[[], None]

    def wait(self, size: int) -> None:
        """Return when `size` bytes are free, or none became free for too long; the allocation then fails."""
        most, until = -1, 0.0
        while (free := self.free()) < size:
            now = time.monotonic()
            if free > most:
                most, until = free, now + self.seconds
            if now > until:
                return
            self.check()
            time.sleep(PAUSE)


def as_room_comes(blocks: Sequence[Kept], room: RoomWait | None) -> Iterator[Sequence[Kept]]:
    """Yield `blocks` in groups, each when there is room for it, which the caller takes before the next.

    The last of them take the place of the process's placeholders. All are one group where there is no `room` to come.
    """
    if room is None:
        if blocks:
            yield blocks
        return
    left, placeholders = sum(one.size for one in blocks), placeholders_of(blocks)
    for batch in small_batches(blocks, PORTION):
        size = sum(one.size for one in batch)
        left -= size
        room.wait(size if left else size - placeholders)
        yield batch


def placeholders_of(blocks: Iterable[Kept]) -> int:
    """Return the bytes of the placeholders that stand for `blocks` together, one of each size that any needs."""
    needed = set()
    for block in blocks:
        rest = block.size
        for size in PLACEHOLDER_SIZES:
            if rest >= size:
                needed.add(size)
                rest %= size
    return sum(needed)

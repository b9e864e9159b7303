"""Bytes of the arena that are on their GPU before their program is: copied there while the driver restores it.

The program makes its memory itself, and cannot before it is restored; so they wait in memory of the worker, from where
the GPU copies them very fast. The driver needs the link meanwhile for a short time: one copy at a time leaves it enough
gaps. Measured with driver 580.159.04 on an H200, where it takes 0.27 s alone: with copies of 8 MiB 0.32 s, in which 12
GiB are copied, with copies of 64 MiB 0.4 s, in which 21 GiB are copied; with copies queued up behind each other it
waits for all of them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.extents import Extent, total
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.records import Record
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import COPY, NOTHING, ArenaCopier, Prefetched, gpus_named
from kybernate_shim.cuda_worker.filling import Filling, readable
from kybernate_shim.cuda_worker.room import PAUSE, PORTION
from kybernate_shim.errors import Stopped

AHEAD: Final = COPY  # of one copy
BESIDE_OTHERS: Final = 16 << 20  # of one where another process leaves, whose driver needs the GPU, too
PIECE: Final = 256 << 20  # of the GPU's memory, most of which is needed for a moment only; a multiple of AHEAD


@dataclass
class _Staged:
    """Memory of ours on the GPU, and how many of its copies the program does not have yet."""

    address: int
    copies: int = 0


class ArenaPrefetch:
    """Copies what `record` names, in its order, until it is stopped or the GPU has no more than `free` bytes.

    What comes from an image is copied as it comes. `room_comes`: another process is giving up room, which is waited
    for; a part of it stays free in which the program can make its memory.
    """

    def __init__(
        self, memory: Memory, copies: ArenaCopier, gpu: str, record: Record, free: int, *, room_comes: bool = False
    ) -> None:
        """`gpu` is the GPU's UUID. A failure only ends it early."""
        self.record = record
        self._filling = Filling(memory, record, self._check)
        self._copies = copies
        self._gpu = gpu
        self._blocks = readable(record)
        self._size = sum(total(one.extents) for one in self._blocks)
        self._room_comes = room_comes
        self._step = BESIDE_OTHERS if room_comes else AHEAD
        self._free = free
        if room_comes:
            self._free += PORTION + max((one.size for one in self._blocks), default=0)
        self._done = NOTHING
        self._places: list[_Staged] = []
        self._place_of: dict[int, _Staged] = {}  # by the offset in the arena
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> Prefetched:
        """Return what has been copied until now."""
        self._stopping.set()
        self._thread.join()
        return self._done

    def used(self, extents: Iterable[Extent]) -> None:
        """Note that the program has these parts of the arena; free memory whose content it has entirely."""
        offsets, gone = sorted(self._place_of), list[_Staged]()
        for extent in extents:
            for offset in offsets[bisect_left(offsets, extent.start) : bisect_left(offsets, extent.end)]:
                place = self._place_of.pop(offset)
                del self._done.places[offset]
                place.copies -= 1
                if not place.copies:
                    self._places.remove(place)
                    gone.append(place)
        self._give_back(self._done.gpu, gone)

    def close(self) -> None:
        """Free all of the GPU's memory. Idempotent."""
        gpu = self.stop().gpu
        places, self._places, self._place_of, self._done = self._places, [], {}, NOTHING
        self._give_back(gpu, places)

    def _give_back(self, gpu: int, places: Iterable[_Staged]) -> None:
        with suppress(DriverRefused):  # a failed GPU; its memory is freed when this process ends
            self._copies.release(gpu, [place.address for place in places])

    def _run(self) -> None:
        try:
            for gpu in gpus_named([self._gpu]):
                self._done = Prefetched(gpu)
                self._copy(self._done)
        except (Stopped, DriverRefused, ArenaIncomplete):
            pass  # where it was not stopped, the GPU has no room, or has failed, which shows when all is copied

    def _copy(self, done: Prefetched) -> None:
        place, address, room = _Staged(0), 0, 0
        with self._copies.one_by_one(done.gpu) as copy:
            for offset, size in self._pieces():
                self._check()
                if room < size:
                    room = min(PIECE, self._size - done.size)
                    if not self._has_room(done.gpu, room):
                        return
                    address = self._copies.allocate(done.gpu, room)
                    self._places.append(place := _Staged(address))
                copy(offset, address, size)
                done.add(offset, address, size)
                place.copies += 1
                self._place_of[offset] = place
                address, room = address + size, room - size

    def _has_room(self, gpu: int, size: int) -> bool:
        while self._copies.free(gpu) - size < self._free:
            if not self._room_comes:
                return False
            self._check()
            time.sleep(PAUSE)
        return True

    def _check(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the arena, bytes) of what is there or arrives, without holes."""
        for portion in self._filling.portions(self._blocks):
            for parts in portion:
                for part in parts:
                    if not part.extent.is_hole:
                        yield from _cut(part.extent, self._step)


def _cut(extent: Extent, step: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of copies that do not cross a multiple of `step`."""
    at = extent.start
    while at < extent.end:
        size = min(step - at % step, extent.end - at)
        yield at, size
        at += size

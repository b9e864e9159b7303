"""What is copied before its program is there, on a GPU that is only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import Event
from typing import cast

import pytest

from kybernate_shim.arena.errors import filler_ended
from kybernate_shim.arena.extents import HOLE, Extent, Kept
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.records import Filler, Record
from kybernate_shim.cuda_worker import filling, prefetch
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import ArenaCopier
from kybernate_shim.cuda_worker.prefetch import AHEAD, PIECE, ArenaPrefetch
from kybernate_shim.cuda_worker.room import PORTION
from tests.fakes.actor import eventually

UUID = "GPU-1"
MIB = 1 << 20
EXTENTS = (Extent(3 * AHEAD + 2 * MIB, AHEAD), Extent(HOLE, AHEAD), Extent(10 * AHEAD, 2 * PIECE))
NOTE = Record([Kept(0, 0x1000, sum(one.size for one in EXTENTS), EXTENTS)])


class Gpu:
    """Stands in for an ArenaCopier: has `size` bytes of room, and copies until `most` copies are made."""

    def __init__(self, size: int, most: int = 1 << 30) -> None:
        self.room = size
        self.sizes: dict[int, int] = {}
        self.copies: list[tuple[int, int, int]] = []
        self.waits = Event()  # set by the second look at what is free
        self._looks = 0
        self._most = most

    @contextmanager
    def one_by_one(self, gpu: int) -> Iterator[Callable[[int, int, int], None]]:
        yield self._copy

    def _copy(self, offset: int, address: int, size: int) -> None:
        if len(self.copies) == self._most:
            raise DriverRefused("no more")
        self.copies.append((offset, address, size))

    def free(self, gpu: int) -> int:
        self._looks += 1
        if self._looks > 1:
            self.waits.set()
        return self.room

    def allocate(self, gpu: int, size: int) -> int:
        address = 1 << 40 | len(self.sizes) << 32
        self.room -= size
        self.sizes[address] = size
        return address

    def release(self, gpu: int, addresses: list[int]) -> None:
        for address in addresses:
            self.room += self.sizes.pop(address)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "gpus_named", lambda uuids: [3] if UUID in uuids else [])


def begun(gpu: Gpu, free: int = 0, uuid: str = UUID) -> ArenaPrefetch:
    """Return a prefetch that has done all that it will."""
    made = ArenaPrefetch(Memory(0), cast("ArenaCopier", gpu), uuid, NOTE, free)
    made._thread.join()
    return made


def test_all_but_the_holes_is_copied_to_memory_of_its_own() -> None:
    gpu = Gpu(4 * PIECE)
    made = begun(gpu)
    done = made.stop()
    assert done.gpu == 3
    assert done.size == AHEAD + 2 * PIECE
    assert gpu.copies[:3] == [
        (3 * AHEAD + 2 * MIB, done.places[3 * AHEAD + 2 * MIB][0], AHEAD - 2 * MIB),
        (4 * AHEAD, done.places[4 * AHEAD][0], 2 * MIB),
        (10 * AHEAD, done.places[10 * AHEAD][0], AHEAD),
    ]
    ends = sorted((address, address + size) for _, address, size in gpu.copies)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert all(any(at <= start and end <= at + size for at, size in gpu.sizes.items()) for start, end in ends)
    made.close()
    made.close()
    assert gpu.room == 4 * PIECE


@pytest.mark.parametrize(("room", "pieces"), [(PIECE - 1, 0), (PIECE, 1), (2 * PIECE + AHEAD - MIB, 2)])
def test_what_has_to_stay_free_does(room: int, pieces: int) -> None:
    gpu = Gpu(room + 5 * MIB)
    made = begun(gpu, 5 * MIB)
    assert len(gpu.sizes) == pieces
    assert made.stop().size <= pieces * PIECE
    made.close()
    assert gpu.room == room + 5 * MIB


def test_refusal_leaves_what_was_copied() -> None:
    gpu = Gpu(4 * PIECE, most=2)
    made = begun(gpu)
    assert made.stop().size == AHEAD
    assert len(made.stop().places) == 2
    made.close()
    assert gpu.room == 4 * PIECE


def test_gpu_that_is_not_here_gets_nothing() -> None:
    gpu = Gpu(4 * PIECE)
    made = begun(gpu, uuid="GPU-2")
    assert not made.stop().places
    made.close()
    assert not gpu.copies


def test_what_the_program_has_is_given_back() -> None:
    gpu = Gpu(4 * PIECE)
    made = begun(gpu)
    made.stop()
    held = len(gpu.sizes)
    made.used([EXTENTS[0]])
    assert len(gpu.sizes) == held  # the rest of its memory is still needed
    made.used([Extent(10 * AHEAD, PIECE)])
    assert len(gpu.sizes) == held - 1
    made.used([Extent(HOLE, PIECE), Extent(10 * AHEAD + PIECE, PIECE)])
    assert not gpu.sizes
    made.close()
    assert gpu.room == 4 * PIECE


def test_room_that_comes_is_waited_for_and_the_largest_block_fits_besides() -> None:
    block = NOTE.kept[0].size
    gpu = Gpu(PIECE + PORTION)
    made = ArenaPrefetch(Memory(0), cast("ArenaCopier", gpu), UUID, NOTE, 5 * MIB, room_comes=True)
    assert gpu.waits.wait(5)
    assert not gpu.copies
    gpu.room += 5 * MIB + block
    assert eventually(lambda: len(gpu.sizes) == 1)
    gpu.room += 4 * PIECE
    made._thread.join(5)
    assert made.stop().size == AHEAD + 2 * PIECE
    made.close()


def test_wait_for_room_ends_with_a_stop() -> None:
    made = ArenaPrefetch(Memory(0), cast("ArenaCopier", Gpu(0)), UUID, NOTE, 0, room_comes=True)
    assert not made.stop().places


class Comes:
    """An arena that says how many bytes have come."""

    there = 0

    def filled(self, owner: ArenaOwner) -> int:
        if self.there < 0:
            raise filler_ended(owner.pid)
        return self.there


@pytest.mark.parametrize("ends", [True, False])
def test_bytes_of_an_image_are_copied_as_they_come(ends: bool) -> None:
    memory, gpu = Comes(), Gpu(4 * PIECE)
    record = Record([], pending=NOTE.kept, filler=Filler(ArenaOwner(1, 1), 0))
    made = ArenaPrefetch(cast("Memory", memory), cast("ArenaCopier", gpu), UUID, record, 0)
    come = 2 * AHEAD + filling.PORTION
    memory.there = come
    whole = [*EXTENTS[:1], Extent(10 * AHEAD, filling.PORTION)]
    assert eventually(lambda: sum(size for _, _, size in gpu.copies) == sum(one.size for one in whole))
    assert all(any(one.start <= at and at + size <= one.end for one in whole) for at, _, size in gpu.copies)
    memory.there = -1 if ends else NOTE.kept[0].size
    made._thread.join(5)
    assert made.stop().size == (sum(one.size for one in whole) if ends else AHEAD + 2 * PIECE)
    made.close()
    assert gpu.room == 4 * PIECE

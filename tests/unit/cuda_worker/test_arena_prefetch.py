"""What is copied before its program is there, on a GPU that is only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import pytest

from kybernate_shim.arena.extents import HOLE, Extent, Kept
from kybernate_shim.arena.records import Record
from kybernate_shim.cuda_worker import prefetch
from kybernate_shim.cuda_worker.calls import DriverRefused
from kybernate_shim.cuda_worker.copier import AHEAD, ArenaCopier
from kybernate_shim.cuda_worker.prefetch import PIECE, ArenaPrefetch

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
        self._most = most

    @contextmanager
    def one_by_one(self, gpu: int) -> Iterator[Callable[[int, int, int], None]]:
        yield self._copy

    def _copy(self, offset: int, address: int, size: int) -> None:
        if len(self.copies) == self._most:
            raise DriverRefused("no more")
        self.copies.append((offset, address, size))

    def free(self, gpu: int) -> int:
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
    made = ArenaPrefetch(cast("ArenaCopier", gpu), uuid, NOTE, free)
    made._thread.join()
    return made


def test_all_but_the_holes_is_copied_to_memory_of_its_own() -> None:
    gpu = Gpu(4 * PIECE)
    made = begun(gpu)
    done = made.stop()
    assert done.gpu == 3
    assert done.size == AHEAD + 2 * PIECE
    assert gpu.copies[:3] == [
        (3 * AHEAD + 2 * MIB, done.places[3 * AHEAD + 2 * MIB], AHEAD - 2 * MIB),
        (4 * AHEAD, done.places[4 * AHEAD], 2 * MIB),
        (10 * AHEAD, done.places[10 * AHEAD], AHEAD),
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

"""Memory is made as room comes: no batch before there is room for it, and the placeholders' room last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.arena.extents import Extent, Kept
from kybernate_shim.cuda_worker import room as room_module
from kybernate_shim.cuda_worker.program_blocks import BATCH, small_batches
from kybernate_shim.cuda_worker.room import PORTION, RoomWait, as_room_comes, placeholders_of

MIB = 1 << 20


def blocks_of(sizes: list[int]) -> list[Kept]:
    return [Kept(index, index << 40, size, (Extent(0, size),)) for index, size in enumerate(sizes)]


@dataclass
class Gpu:
    """A GPU of which `steps` say how much more is free at each look; each look takes a second."""

    steps: list[int]
    there: int = 0
    now: float = 0.0
    looks: list[int] = field(default_factory=list)

    def free(self) -> int:
        self.now += 1
        self.there += self.steps.pop(0) if self.steps else 0
        return self.there


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu, float], RoomWait]:
    def begin(gpu: Gpu, seconds: float) -> RoomWait:
        monkeypatch.setattr(room_module.time, "monotonic", lambda: gpu.now)
        monkeypatch.setattr(room_module.time, "sleep", lambda _: None)
        return RoomWait(gpu.free, seconds, lambda: None)

    return begin


@given(st.lists(st.integers(1, 300), max_size=200), st.integers(1, 400))
def test_small_batches_have_all_blocks_in_order(sizes: list[int], most: int) -> None:
    blocks = blocks_of(sizes)
    found = list(small_batches(blocks, most))
    assert [one for batch in found for one in batch] == blocks
    for batch in found:
        assert 0 < len(batch) <= BATCH
        assert len(batch) == 1 or sum(one.size for one in batch) <= most


def test_each_batch_waits_for_its_room(on: Callable[[Gpu, float], RoomWait]) -> None:
    blocks = blocks_of([256 * MIB] * 6)
    gpu = Gpu([64 * MIB] * 100)
    taken = 0
    for batch in as_room_comes(blocks, on(gpu, 3)):
        size = sum(one.size for one in batch)
        assert size == PORTION
        taken += size
        last = taken == 6 * 256 * MIB
        assert gpu.there >= size - (placeholders_of(blocks) if last else 0)
        assert gpu.there < size + 64 * MIB
        gpu.there -= size  # less than nothing where the placeholders' room was taken, too
    assert taken == 6 * 256 * MIB


def test_placeholders_are_one_of_each_size_that_a_block_needs() -> None:
    assert placeholders_of([]) == 0
    assert placeholders_of(blocks_of([256 * MIB, 128 * MIB])) == 64 * MIB
    assert placeholders_of(blocks_of([132 * MIB])) == 66 * MIB
    assert placeholders_of(blocks_of([20 * MIB, 26 * MIB, 2 * MIB])) == 28 * MIB


def test_process_of_placeholders_alone_needs_no_more(on: Callable[[Gpu, float], RoomWait]) -> None:
    blocks = blocks_of([20 * MIB] * 3)
    assert list(as_room_comes(blocks, on(Gpu([]), 3))) == [blocks]


def test_room_that_does_not_come_is_not_waited_for_for_ever(on: Callable[[Gpu, float], RoomWait]) -> None:
    gpu = Gpu([MIB, 0, 0, MIB, 0, 0, MIB])
    on(gpu, 3).wait(100 * MIB)
    assert (gpu.there, gpu.now) == (3 * MIB, 11)


def test_job_ends_at_its_own_deadline(on: Callable[[Gpu, float], RoomWait]) -> None:
    class Over(Exception):
        pass

    def check() -> None:
        raise Over

    room = on(Gpu([]), 3)
    with pytest.raises(Over):
        RoomWait(room.free, 3, check).wait(1)


def test_without_a_wait_for_room_all_blocks_are_one_group() -> None:
    blocks = blocks_of([1] * (BATCH + 1))
    assert list(as_room_comes(blocks, None)) == [blocks]
    assert not list(as_room_comes([], None))

"""Bytes that come from an image are read once each, and none before it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.arena.errors import ArenaIncomplete, filler_ended
from kybernate_shim.arena.extents import HOLE, Extent, Kept, parts
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.records import Filler, Record
from kybernate_shim.cuda_worker import filling
from kybernate_shim.cuda_worker.deadline import JobDeadline
from kybernate_shim.cuda_worker.filling import Filling, readable

ME = ArenaOwner(1, 1)
BASE = 1000
sizes = st.lists(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=3), min_size=1, max_size=5)


@dataclass
class Comes:
    """An arena where so many more bytes are there at each look."""

    steps: list[int]
    there: int = 0
    looks: list[int] = field(default_factory=list)

    def filled(self, owner: ArenaOwner) -> int:
        assert owner == ME
        if not self.steps:
            raise filler_ended(owner.pid)
        self.there += self.steps.pop(0)
        self.looks.append(self.there)
        return self.there


def blocks_of(shape: list[list[tuple[int, bool]]]) -> list[Kept]:
    found, at = [], 0
    for index, extents in enumerate(shape):
        own = []
        for size, hole in extents:
            own.append(Extent(HOLE if hole else at, size))
            at += size
        found.append(Kept(index, index << 20, sum(size for size, _ in extents), tuple(own)))
    return found


def filling_of(memory: Any, blocks: list[Kept]) -> Filling:
    return Filling(memory, Record([], pending=blocks, filler=Filler(ME, BASE)), JobDeadline(10).check)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PORTION", 8)
    monkeypatch.setattr(filling, "PAUSE", 0)


@given(sizes, st.lists(st.integers(0, 30), max_size=30), st.randoms())
def test_each_byte_is_read_once_and_not_before_it_has_come(
    shape: list[list[tuple[int, bool]]], steps: list[int], random: Any
) -> None:
    blocks = blocks_of(shape)
    whole = sum(one.size for one in blocks)
    starts = {one.index: sum(before.size for before in blocks[: one.index]) for one in blocks}
    batch = blocks[:]
    random.shuffle(batch)
    memory = Comes([BASE, *steps, whole])
    read: list[set[int]] = [set() for _ in batch]
    for portion in filling_of(memory, blocks).portions(batch):
        for number, (own, wanted) in enumerate(zip(read, portion, strict=True)):
            for part in wanted:
                bytes_of = range(part.offset, part.offset + part.extent.size)
                assert BASE + starts[batch[number].index] + bytes_of.stop <= memory.there
                assert own.isdisjoint(bytes_of)
                own.update(bytes_of)
                before = [one for one in parts(batch[number].extents) if one.offset <= part.offset]
                full = max(before, key=lambda one: one.offset)
                if full.extent.is_hole:
                    assert part.extent.is_hole
                else:
                    assert part.extent.start - full.extent.start == part.offset - full.offset
    assert read == [set(range(one.size)) for one in batch]


def test_what_does_not_come_any_more_ends_it() -> None:
    blocks = blocks_of([[(100, False)]])
    portions = filling_of(Comes([BASE + 40, 0, 0]), blocks).portions(blocks)
    assert [part.extent.size for part in next(portions)[0]] == [40]
    with pytest.raises(ArenaIncomplete):
        next(portions)


def test_record_without_a_filler_is_read_as_it_is() -> None:
    blocks = blocks_of([[(10, False), (5, True)], [(3, False)]])
    record = Record(blocks[:1], pending=blocks[1:])
    assert readable(record) == blocks[:1]
    portions = list(Filling(Comes([]), record, JobDeadline(10).check).portions(blocks[:1]))  # type: ignore[arg-type]
    assert portions == [[list(parts(blocks[0].extents))]]

"""Which memory appeared: by comparing maps, never by size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.vram_mover.regions import SMALLEST_BYTES, appeared
from tests.fakes.memory_process import MemoryProcess

MIB = 1 << 20
UNIT = SMALLEST_BYTES


def anonymous(start: int, end: int, perms: str = "rw-p", name: str = "") -> Region:
    return Region(start * UNIT, end * UNIT, perms, 0, name)


def test_new_mapping_is_found_and_an_old_larger_one_is_not() -> None:
    old = anonymous(100, 200)
    assert appeared([old], [anonymous(10, 12), old]) == [anonymous(10, 12)]


def test_mapping_that_grew_or_merged_counts_with_its_new_parts_only() -> None:
    assert appeared([anonymous(10, 20)], [anonymous(8, 25)]) == [anonymous(8, 10), anonymous(20, 25)]
    assert appeared([anonymous(10, 11), anonymous(12, 13)], [anonymous(10, 13)]) == [anonymous(11, 12)]


def test_mapping_that_was_split_or_changed_its_rights_is_no_new_one() -> None:
    old = anonymous(10, 20)
    assert appeared([old], [anonymous(10, 15), anonymous(15, 20, "---p")]) == []
    assert appeared([anonymous(10, 20, "---p")], [old]) == []


def test_small_shared_and_file_mappings_are_left_to_criu() -> None:
    small = Region(0, UNIT - 4096, "rw-p", 0, "")
    shared, file = anonymous(4, 8, "rw-s"), Region(8 * UNIT, 12 * UNIT, "rw-p", 77, "/lib/x.so")
    assert appeared([], [small, shared, file, anonymous(20, 30, name="[heap]"), anonymous(40, 41, "r--p")]) == []


def test_mapping_of_a_live_process_is_found_to_the_byte() -> None:
    with MemoryProcess() as target:
        before = read_maps(target.pid)
        wanted = target.region("a", 24 * MIB)
        found = appeared(before, read_maps(target.pid))
        assert [(region.start, region.end) for region in found] == [(wanted.start, wanted.end)]


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8)


def disjoint(intervals: list[tuple[int, int]]) -> list[Region]:
    regions: list[Region] = []
    for start, size in sorted(intervals):
        low = max(start, regions[-1].end // UNIT if regions else 0)
        regions.append(anonymous(low, low + size))
    return regions


@given(INTERVALS, INTERVALS)
def test_appeared_is_the_new_map_without_the_old_one(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    old, new = disjoint(before), disjoint(after)
    units = {unit for region in new for unit in range(region.start // UNIT, region.end // UNIT)}
    units -= {unit for region in old for unit in range(region.start // UNIT, region.end // UNIT)}
    found = [unit for region in appeared(old, new) for unit in range(region.start // UNIT, region.end // UNIT)]
    assert sorted(found) == sorted(units)
    assert len(found) == len(set(found))

"""Parts of the arena by NUMA node: what is added to what is there, what cannot be, and what is taken first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank, Room
from kybernate_shim.arena.extents import Extent
from kybernate_shim.sizes import NO_NODE, NodeSizes

MIB = 1 << 20


def bank(node: int, start: int, size: int) -> Bank:
    return Bank(node, Extent(start, size))


@pytest.mark.parametrize(
    ("there", "wanted", "added"),
    [
        ([], ((NO_NODE, 8),), [bank(NO_NODE, 0, 8)]),
        ([], ((0, 8), (1, 4)), [bank(0, 0, 8), bank(1, 8, 4)]),
        ([bank(0, 0, 8), bank(1, 8, 4)], ((0, 8), (1, 6)), [bank(1, 12, 2)]),
        ([bank(0, 0, 8), bank(1, 8, 4)], ((0, 2), (1, 2)), []),
        ([bank(0, 0, 2), bank(1, 2, 2), bank(0, 4, 2)], ((0, 5), (1, 2)), [bank(0, 6, 1)]),
        ([bank(NO_NODE, 0, 8)], ((0, 4), (1, 4)), []),
        ([bank(NO_NODE, 0, 8)], ((0, 8), (1, 8)), [bank(0, 8, 8)]),
    ],
)
def test_only_what_is_missing_is_added(there: list[Bank], wanted: NodeSizes, added: list[Bank]) -> None:
    assert banks.missing(there, wanted) == added


def test_banks_are_found_again(tmp_path: Path) -> None:
    made = [bank(0, 0, 8), bank(NO_NODE, 8, 4)]
    assert banks.read(tmp_path / "banks") == []
    banks.write(tmp_path / "banks", made)
    assert banks.read(tmp_path / "banks") == made


@pytest.mark.parametrize(
    ("sizes", "nodes", "says"),
    [
        (((0, 4 * MIB), (1, 4 * MIB)), {0: 4 * MIB, 1: 8 * MIB}, ""),
        (((0, 5 * MIB),), {0: 4 * MIB, 1: 8 * MIB}, "requires 5 MiB of NUMA node 0, which has 4: correct /etc/"),
        (((0, MIB), (3, MIB)), {0: 4 * MIB, 2: MIB}, "names NUMA node 3, and this machine has 0, 2: correct /etc/"),
        (((0, MIB),), {}, "names NUMA node 0, and this machine reports none"),
        (((NO_NODE, 13 * MIB),), {0: 4 * MIB, 1: 8 * MIB}, ""),
        (((NO_NODE, 13 * MIB),), {}, ""),
    ],
)
def test_sizes_that_the_machine_cannot_have_are_told(sizes: NodeSizes, nodes: Mapping[int, int], says: str) -> None:
    said = banks.fault_of(sizes, nodes)
    assert says in said
    assert bool(says) == bool(said)


@given(st.dictionaries(st.integers(NO_NODE, 1000), st.integers(1, 1 << 50)))
def test_sizes_survive_a_command_line(sizes: dict[int, int]) -> None:
    assert banks.from_text(banks.as_text(tuple(sizes.items()))) == tuple(sizes.items())


def test_plain_number_is_memory_of_no_node() -> None:
    assert banks.from_text("4096") == ((NO_NODE, 4096),)
    assert banks.from_text("0") == banks.from_text("") == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5), st.data())
def test_room_gives_what_is_free_near_ones_first(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    made: list[Bank] = []
    for node, size in sizes:
        made.append(bank(node, banks.size_of(made), size))
    nodes = [one.node for one in made for _ in range(one.extent.size)]
    free = [at for at in range(len(nodes)) if data.draw(st.booleans())]
    near, wanted = data.draw(st.integers(0, 3)), data.draw(st.integers(0, len(free)))
    room = Room([Extent(at, 1) for at in free], made)
    got = [extent.start for extent in room.take(wanted, near)]
    assert len(got) == wanted
    assert room.bytes == len(free) - wanted
    assert [nodes[at] == near for at in got] == sorted((nodes[at] == near for at in free), reverse=True)[:wanted]
    assert sorted([*got, *(extent.start for extent in room.take(room.bytes))]) == free

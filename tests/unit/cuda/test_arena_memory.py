"""The arena's book-keeping: who has which bytes, also when processes end and the helper is another one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.cuda.arena.memory import GRAIN, ArenaFull, Extent, Memory, Owner, _cut, _gaps

SIZE = 16 * GRAIN


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """An arena in a plain directory: what is mounted there is nothing to the book-keeping."""
    found = Memory(SIZE, tmp_path)
    found.file.touch()
    os.truncate(found.file, SIZE)
    return found


@pytest.fixture
def me() -> Owner:
    return Owner.of(os.getpid())


def test_claims_do_not_overlap_and_are_found_again(memory: Memory, me: Owner) -> None:
    other = Owner.of(os.getppid())
    first = memory.claim(me, [(0, 0x1000, 3 * GRAIN), (4, 0x2000, GRAIN)])
    second = memory.claim(other, [(0, 0x1000, 5 * GRAIN)])
    taken = [extent for kept in (*first, *second) for extent in kept.extents]
    assert _gaps(sorted(taken, key=lambda extent: extent.start), SIZE) == [Extent(9 * GRAIN, 7 * GRAIN)]
    assert memory.kept(me) == first
    assert Memory(SIZE, memory.file.parent).kept(other) == second
    assert memory.free() == 7 * GRAIN


def test_claim_that_does_not_fit_changes_nothing(memory: Memory, me: Owner) -> None:
    with pytest.raises(ArenaFull, match="34 MiB of VRAM do not fit into the arena, 32 MiB of it are free"):
        memory.claim(me, [(0, 0, SIZE + GRAIN)])
    assert memory.kept(me) == []
    assert memory.free() == SIZE


def test_bytes_of_a_process_that_has_ended_are_free(memory: Memory) -> None:
    child = subprocess.Popen(["sleep", "60"])
    owner = Owner.of(child.pid)
    memory.claim(owner, [(0, 0, SIZE)])
    assert memory.free() == 0
    child.kill()
    child.wait()
    assert memory.free() == SIZE


def test_pid_that_was_used_again_is_somebody_else(memory: Memory, me: Owner) -> None:
    memory.claim(Owner(me.pid, me.started - 1), [(0, 0, GRAIN)])
    assert memory.kept(me) == []
    assert memory.free() == SIZE


def test_giving_up_twice_is_no_error(memory: Memory, me: Owner) -> None:
    memory.claim(me, [(0, 0, GRAIN)])
    memory.give_up(me)
    memory.give_up(me)
    assert memory.free() == SIZE


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), st.integers(1, 40))
def test_cut_takes_exactly_what_is_asked_from_what_is_free(used: list[tuple[int, int]], wanted: int) -> None:
    taken = sorted((Extent(start, size) for start, size in used), key=lambda extent: extent.start)
    gaps = _gaps(taken, 64)
    busy = {at for extent in taken for at in range(extent.start, extent.start + extent.size)}
    free = sum(gap.size for gap in gaps)
    assert free == 64 - len(busy & set(range(64)))
    if wanted <= free:
        got = [at for extent in _cut(gaps, wanted) for at in range(extent.start, extent.start + extent.size)]
        assert len(got) == len(set(got)) == wanted
        assert not busy & set(got)

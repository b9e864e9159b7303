"""The arena's book-keeping: who has which bytes, also when processes end and the helper is another one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.arena import banks, parked
from kybernate_shim.arena import memory as arena
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.errors import ArenaIncomplete
from kybernate_shim.arena.extents import HOLE, Extent, gaps, joined, take
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import MARK, PIECE, PieceHashes, Update
from kybernate_shim.arena.records import Filler, read_number, write_number
from kybernate_shim.errors import Busy, NoRoom
from kybernate_shim.sizes import GRAIN, NO_NODE

KEY = bytes(range(32))
SIZE = 16 * GRAIN


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """An arena in a plain directory: what is mounted there is nothing to the book-keeping."""
    found = Memory(SIZE, tmp_path)
    found.file.touch()
    os.truncate(found.file, SIZE)
    return found


@pytest.fixture
def me() -> ArenaOwner:
    return ArenaOwner.of(os.getpid())


def test_claims_do_not_overlap_and_are_found_again(memory: Memory, me: ArenaOwner) -> None:
    other = ArenaOwner.of(os.getppid())
    first = memory.claim(me, [(0, 0x1000, 3 * GRAIN), (4, 0x2000, GRAIN)]).kept
    second = memory.claim(other, [(0, 0x1000, 5 * GRAIN)]).kept
    taken = [extent for kept in (*first, *second) for extent in kept.extents]
    assert list(gaps(taken, SIZE)) == [Extent(9 * GRAIN, 7 * GRAIN)]
    memory.confirm(me, first)
    memory.confirm(other, second)
    assert memory.kept(me) == first
    assert Memory(SIZE, memory.file.parent).kept(other) == second
    assert memory.free() == 7 * GRAIN


def test_claim_that_does_not_fit_changes_nothing(memory: Memory, me: ArenaOwner) -> None:
    with pytest.raises(NoRoom, match="34 MiB of VRAM do not fit into the arena, 32 MiB of it are free"):
        memory.claim(me, [(0, 0, SIZE + GRAIN)])
    assert memory.kept(me) == []
    assert memory.free() == SIZE


def test_bytes_of_a_process_that_has_ended_are_free(memory: Memory) -> None:
    child = subprocess.Popen(["sleep", "60"])
    owner = ArenaOwner.of(child.pid)
    memory.claim(owner, [(0, 0, SIZE)])
    assert memory.free() == 0
    child.kill()
    child.wait()
    assert memory.free() == SIZE


def test_pid_that_was_used_again_is_somebody_else(memory: Memory, me: ArenaOwner) -> None:
    memory.claim(ArenaOwner(me.pid, me.started - 1), [(0, 0, GRAIN)])
    assert memory.kept(me) == []
    assert memory.free() == SIZE


def test_giving_up_twice_is_no_error(memory: Memory, me: ArenaOwner) -> None:
    memory.claim(me, [(0, 0, GRAIN)])
    memory.give_up(me)
    memory.give_up(me)
    assert memory.free() == SIZE


def seen(*pieces: int) -> PieceHashes:
    """What a GPU says of pieces whose content is a number each, 0 being zeros."""
    return PieceHashes(b"".join(bytes([piece]) * MARK for piece in pieces), pieces)


def leave(memory: Memory, owner: ArenaOwner, *pieces: int, key: bytes = KEY) -> Update:
    """Let a process of one block be suspended: everything is copied that has to be."""
    update = memory.update(owner, [(0, 0x1000, len(pieces) * PIECE)], [seen(*pieces)], key)
    memory.confirm(owner, update.kept)
    return update


def copied(update: Update) -> list[int]:
    """The numbers of the pieces that had to be copied."""
    parts = [part for parts in update.changed for part in parts]
    return [at // PIECE for part in parts for at in range(part.offset, part.offset + part.extent.size, PIECE)]


def test_only_what_has_changed_is_copied(memory: Memory, me: ArenaOwner) -> None:
    assert copied(leave(memory, me, 1, 2, 3, 4)) == [0, 1, 2, 3]
    before = memory.kept(me)
    memory.retire(me)
    assert memory.kept(me) == []
    assert memory.free() == SIZE
    again = leave(memory, me, 1, 2, 3, 4)
    assert copied(again) == []
    assert again.clean == 4 * PIECE
    assert memory.kept(me) == before
    memory.retire(me)
    third = leave(memory, me, 1, 9, 3, 4)
    assert copied(third) == [1]
    assert third.clean == 3 * PIECE
    memory.retire(me)
    assert copied(leave(memory, me, 1, 2, 3, 4)) == [1]  # what was there before is gone


def test_zeros_have_no_place(memory: Memory, me: ArenaOwner) -> None:
    update = leave(memory, me, 0, 1, 0, 0)
    assert copied(update) == [1]
    assert update.zero == 3 * PIECE
    (kept,) = memory.kept(me)
    assert kept.extents == (Extent(HOLE, PIECE), Extent(0, PIECE), Extent(HOLE, 2 * PIECE))
    assert memory.free() == SIZE - PIECE
    memory.retire(me)
    filled = leave(memory, me, 0, 1, 5, 0)
    assert copied(filled) == [2]
    memory.retire(me)
    emptied = leave(memory, me, 0, 0, 5, 0)
    assert (copied(emptied), emptied.zero, emptied.clean) == ([], 3 * PIECE, PIECE)
    assert memory.free() == SIZE - PIECE


def test_zeros_alone_need_no_arena(memory: Memory, me: ArenaOwner) -> None:
    other = ArenaOwner.of(os.getppid())
    memory.claim(other, [(0, 0, SIZE)])
    assert copied(leave(memory, me, *[0] * 40)) == []
    assert sum(one.size for one in memory.kept(me)) == 40 * PIECE


def test_hashes_are_not_believed_before_the_bytes_are_there(memory: Memory, me: ArenaOwner) -> None:
    leave(memory, me, 1, 2)
    memory.retire(me)
    memory.update(me, [(0, 0x1000, 2 * PIECE)], [seen(1, 9)], KEY)  # and then the worker dies
    assert memory.copies(me).kept == []
    memory.retire(me)
    assert copied(leave(memory, me, 1, 9)) == [1]


def test_hashes_by_another_key_are_not_believed(memory: Memory, me: ArenaOwner) -> None:
    leave(memory, me, 1, 2)
    memory.retire(me)
    assert memory.copies(me).key == KEY
    assert copied(leave(memory, me, 1, 2, key=KEY[::-1])) == [0, 1]


@pytest.mark.parametrize("block", [(1, 0x1000, 2 * PIECE), (0, 0x2000, 2 * PIECE), (0, 0x1000, 3 * PIECE)])
def test_copy_of_another_block_is_none(memory: Memory, me: ArenaOwner, block: tuple[int, int, int]) -> None:
    leave(memory, me, 1, 2)
    memory.retire(me)
    update = memory.update(me, [block], [seen(*[1, 2, 3][: block[2] // PIECE])], KEY)
    assert len(copied(update)) == block[2] // PIECE


def test_what_was_not_hashed_is_no_copy(memory: Memory, me: ArenaOwner) -> None:
    memory.claim(me, [(0, 0x1000, 2 * PIECE)])
    memory.retire(me)
    memory.retire(me)
    assert memory.copies(me).kept == memory.kept(me) == []
    assert list(memory.file.parent.glob("*-*")) == []


def test_copies_give_way_oldest_first(memory: Memory, me: ArenaOwner) -> None:
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        old, young = ArenaOwner.of(first.pid), ArenaOwner.of(second.pid)
        leave(memory, young, *[1] * 6)
        leave(memory, old, *[1] * 6)
        memory.retire(old)
        memory.retire(young)
        assert memory.free() == SIZE
        leave(memory, me, *[1] * 4)
        assert memory.copies(old).kept != []
        leave(memory, me, *[1] * 5)
        assert memory.copies(old).kept == []
        assert memory.copies(young).kept != []
        assert copied(leave(memory, young, *[1] * 6)) == []
        first.kill()
        second.kill()
    assert memory.free() == SIZE - 5 * PIECE


def test_copies_stay_where_their_going_would_not_help(memory: Memory, me: ArenaOwner) -> None:
    other = ArenaOwner.of(os.getppid())
    leave(memory, other, 1, 2)
    memory.retire(other)
    with pytest.raises(NoRoom, match="34 MiB of VRAM do not fit into the arena, 32 MiB of it are free"):
        leave(memory, me, *[1] * 17)
    assert copied(leave(memory, other, 1, 2)) == []


def test_own_copies_count_as_room(memory: Memory, me: ArenaOwner) -> None:
    leave(memory, me, *[1] * 16)
    memory.retire(me)
    assert copied(leave(memory, me, *[2] * 16)) == list(range(16))
    memory.retire(me)
    assert copied(leave(memory, me, *[2] * 12, *[3] * 4)) == [12, 13, 14, 15]
    memory.retire(me)
    with pytest.raises(NoRoom, match="do not fit"):
        leave(memory, me, *[2] * 12, *[4] * 5)
    assert copied(leave(memory, me, *[2] * 12, *[3] * 4)) == []


def test_changed_pieces_do_not_overwrite_what_somebody_else_has_as_well(memory: Memory, me: ArenaOwner) -> None:
    leave(memory, me, 1, 2)
    reader = ArenaOwner.of(os.getppid())
    assert memory.share(reader, [me])[me] == memory.kept(me)
    memory.retire(me)
    (part,) = leave(memory, me, 1, 9).changed[0]
    assert part.extent == Extent(2 * PIECE, PIECE)


def test_preview_names_the_copies_and_what_is_free(memory: Memory, me: ArenaOwner) -> None:
    other = ArenaOwner.of(os.getppid())
    leave(memory, me, 1, 0, 2)
    memory.retire(me)
    assert joined(memory.preview(me, ((NO_NODE, 3 * PIECE),))) == (Extent(0, 2 * PIECE),)
    assert joined(memory.preview(me, ((NO_NODE, 5 * PIECE),))) == (Extent(0, 4 * PIECE),)
    assert joined(memory.preview(other, ((NO_NODE, 99 * PIECE),))) == (Extent(0, SIZE),)


def in_banks(memory: Memory, *nodes: int) -> list[Extent]:
    """Divide the arena evenly among NUMA nodes, and return where each one's part is."""
    size = SIZE // len(nodes)
    found = [Extent(at * size, size) for at in range(len(nodes))]
    banks.write(memory.file.with_name("banks"), map(Bank, nodes, found))
    return found


def test_room_near_the_gpu_goes_first_and_then_any(memory: Memory, me: ArenaOwner) -> None:
    first, second = in_banks(memory, 0, 1)
    blocks = [(0, 0x1000, 3 * PIECE), (1, 0x9000, 2 * PIECE), (2, 0x20000, PIECE)]
    far, near, nowhere = memory.update(me, blocks, near=[1, 0, 7]).kept
    assert far.extents == (Extent(second.start, 3 * PIECE),)
    assert near.extents == (Extent(first.start, 2 * PIECE),)
    assert nowhere.extents == (Extent(first.start + 2 * PIECE, PIECE),)
    memory.give_up(me)
    (all_of_it,) = memory.update(me, [(0, 0x1000, SIZE)], near=[1]).kept
    assert all_of_it.extents == (second, first)


def test_preview_is_near_the_gpus_too(memory: Memory, me: ArenaOwner) -> None:
    first, second = in_banks(memory, 0, 1)
    assert joined(memory.preview(me, ((1, PIECE), (0, 2 * PIECE), (1, PIECE)))) == (
        Extent(second.start, PIECE),
        Extent(first.start, 2 * PIECE),
        Extent(second.start + PIECE, PIECE),
    )
    assert sum(extent.size for extent in memory.preview(me, ((1, 99 * PIECE), (0, PIECE)))) == SIZE


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), st.integers(1, 40))
def test_take_gives_exactly_what_is_asked_from_what_is_free(used: list[tuple[int, int]], wanted: int) -> None:
    taken = [Extent(start, size) for start, size in used]
    room = gaps([*taken, Extent(HOLE, 7)], 64)
    busy = {at for extent in taken for at in range(extent.start, extent.start + extent.size)}
    free = sum(gap.size for gap in room)
    assert free == 64 - len(busy & set(range(64)))
    if wanted <= free:
        got = [at for extent in take(room, wanted) for at in range(extent.start, extent.start + extent.size)]
        assert len(got) == len(set(got)) == wanted
        assert not busy & set(got)
        assert sum(gap.size for gap in room) == free - wanted


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.lists(st.integers(0, 3), min_size=8), max_size=6)
)
def test_whatever_changes_the_arena_has_it_in_the_end(first: list[int], rest: list[list[int]]) -> None:
    """Against a model: a dictionary for the memory, in which every suspend writes what it is told to copy."""
    with tempfile.TemporaryDirectory() as folder:
        memory, me, arena = Memory(SIZE, Path(folder)), ArenaOwner.of(os.getpid()), dict[int, int]()
        memory.file.touch()
        os.truncate(memory.file, SIZE)
        for pieces in (first, *(one[: len(first)] for one in rest)):
            update = leave(memory, me, *pieces)
            for part in (part for parts in update.changed for part in parts):
                for at in range(0, part.extent.size, PIECE):
                    arena[part.extent.start + at] = pieces[(part.offset + at) // PIECE]
            (kept,) = memory.kept(me)
            found = [
                0 if extent.is_hole else arena[extent.start + at]
                for extent in kept.extents
                for at in range(0, extent.size, PIECE)
            ]
            assert found == pieces
            assert kept.extents == joined(kept.extents)
            memory.retire(me)


def test_room_is_nobodys_to_read_before_it_is_confirmed(memory: Memory, me: ArenaOwner) -> None:
    other, third = ArenaOwner.of(os.getppid()), ArenaOwner(1, 0)
    update = memory.claim(other, [(0, 0x1000, GRAIN), (1, 0x9000, GRAIN)])
    assert memory.kept(other) == []
    assert memory.free() == SIZE - 2 * GRAIN
    memory.confirm(other, update.kept, slice(1, 2))
    assert memory.kept(other) == update.kept[1:]
    with pytest.raises(ArenaIncomplete, match=f"2 MiB of process {other.pid} were never copied to the arena"):
        memory.share(me, [other])
    with pytest.raises(ArenaIncomplete):
        memory.hand_over(me, {third: update.kept})
    memory.hand_over(other, {third: update.kept})
    assert memory.kept(me) == memory.kept(third) == []
    memory.hand_over(other, {me: update.kept[1:]})
    assert memory.kept(me) == update.kept[1:]


def test_room_that_is_being_filled_is_told_how_far_it_is(memory: Memory, me: ArenaOwner) -> None:
    filler, other = ArenaOwner.of(os.getppid()), ArenaOwner(1, 0)
    first, second = memory.claim(filler, [(0, 0x1000, GRAIN), (1, 0x9000, GRAIN)]).kept
    memory.hand_over(filler, {me: [first], other: [second]})
    assert [memory.record(one).filler for one in (me, other)] == [Filler(filler, 0), Filler(filler, GRAIN)]
    assert (memory.record(me).pending, memory.kept(me), memory.filled(filler)) == ([first], [], 0)
    for size in (4096, GRAIN + 1, 2 * GRAIN):
        memory.fill(filler, size)
        assert memory.filled(filler) == size
    memory.claim(filler, [(0, 0, GRAIN)])
    assert memory.filled(filler) == 0
    memory.give_up(filler)
    with pytest.raises(ArenaIncomplete, match=f"process {filler.pid}, which was reading the bytes from an image"):
        memory.filled(filler)


def test_number_that_is_being_written_is_the_one_before(tmp_path: Path) -> None:
    """A number that was half of each would let bytes be read that another process has left."""
    path = tmp_path / "filled"
    assert read_number(path) == 0
    write_number(path, 1 << 20)
    with path.open("a") as file:
        file.write("209")
    assert read_number(path) == 1 << 20


def test_bytes_of_who_has_ended_stay_while_a_job_works_with_them(memory: Memory) -> None:
    """Else it would continue in room that is another's by then."""
    with subprocess.Popen(["sleep", "60"]) as child:
        owner = ArenaOwner.of(child.pid)
        memory.claim(owner, [(0, 0, SIZE)])
        with memory.using(owner, 0):
            child.kill()
            child.wait()
            assert memory.free() == 0
            with pytest.raises(Busy, match=f"an earlier job of the arena for process {owner.pid}"):
                memory.using(owner, 0).__enter__()
    assert memory.free() == SIZE
    assert list(memory.file.parent.glob("*-*")) == []


@pytest.fixture
def halves(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The same arena where one account may have half; processes of an even pid are of the one, others of the other."""
    monkeypatch.setattr(arena, "account_of", lambda pid: f"pod {pid % 2}")
    monkeypatch.setattr(ArenaOwner, "alive", True)
    return Memory(SIZE, memory.file.parent, 0.5)


def test_account_has_no_more_than_its_share(halves: Memory) -> None:
    first, second, neighbour = (ArenaOwner(pid, 1) for pid in (2, 4, 3))
    halves.claim(first, [(0, 0, 5 * GRAIN)])
    with pytest.raises(NoRoom, match=r"8 MiB .* share of pod 0 in the arena, which has 10 of 16 MiB"):
        halves.claim(second, [(0, 0, 4 * GRAIN)])
    assert halves.record(second).pending == []
    halves.claim(second, [(0, 0, 3 * GRAIN)])
    halves.claim(second, [(0, 0, 3 * GRAIN)])  # in the place of the one before
    halves.claim(neighbour, [(0, 0, 8 * GRAIN)])
    assert halves.holders() == {"pod 0": 8 * GRAIN, "pod 1": 8 * GRAIN}


def test_account_that_needs_its_share_drops_its_own_copies_first(halves: Memory) -> None:
    old, neighbour, new = (ArenaOwner(pid, 1) for pid in (2, 3, 4))
    for owner in (neighbour, old):
        leave(halves, owner, *[1] * 5)
        halves.retire(owner)
    leave(halves, new, *[1] * 5)
    assert halves.copies(old).kept == []
    assert halves.copies(neighbour).kept != []
    assert halves.holders() == {"pod 0": 5 * GRAIN}


def test_what_is_parked_takes_no_room_and_may_not_be_read(memory: Memory, me: ArenaOwner, tmp_path: Path) -> None:
    other = ArenaOwner.of(os.getppid())
    update = memory.claim(me, [(0, 0x1000, 3 * GRAIN), (4, 0x2000, GRAIN)])
    with pytest.raises(ArenaIncomplete, match="never copied"):  # only what is whole
        memory.park(me, tmp_path / "there")
    memory.confirm(me, update.kept)
    memory.park(me, tmp_path / "there")
    assert memory.free() == SIZE
    assert memory.parked() == {str(tmp_path / "there")}
    record = memory.record(me)
    assert (record.kept, sum(one.size for one in record.pending)) == ([], 4 * GRAIN)
    with pytest.raises(ArenaIncomplete, match=r"is parked in .*there"):
        memory.share(other, [me])
    with pytest.raises(ArenaIncomplete):
        memory.park(me, tmp_path / "again")

    filled = memory.claim(other, [(0, 0x1000, 3 * GRAIN), (4, 0x2000, GRAIN)]).kept
    memory.confirm(other, filled)
    memory.hand_over(other, {me: filled})
    assert memory.kept(me) == filled
    assert memory.parked() == set()
    assert memory.free() == SIZE - 4 * GRAIN


def test_process_that_has_ended_has_nothing_parked(memory: Memory, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        owner = ArenaOwner.of(child.pid)
        memory.confirm(owner, memory.claim(owner, [(0, 0x1000, GRAIN)]).kept)
        memory.park(owner, tmp_path / "there")
        assert memory.parked()
        child.kill()
    assert not memory.parked()


def test_directories_of_the_ended_are_removed_and_no_others(memory: Memory, me: ArenaOwner, tmp_path: Path) -> None:
    root = tmp_path / "parked"
    root.mkdir()
    with parked.new_directory(root, memory, "b.") as filled:
        with parked.new_directory(root, memory, "a.") as directory:
            memory.confirm(me, memory.claim(me, [(0, 0x1000, GRAIN)]).kept)
            memory.park(me, directory)
        (root / f"ended{parked.SUFFIX}").mkdir()
        (root / "another one's").mkdir()
        parked.clear(root, memory)
        assert sorted(root.iterdir()) == sorted([directory, filled, root / "another one's"])  # we, and what is filled
        root.rename(tmp_path / "elsewhere")
        parked.clear(tmp_path / "elsewhere", memory)
        assert (tmp_path / "elsewhere" / directory.name).is_dir()  # where a link may lead now
        (tmp_path / "elsewhere").rename(root)
        memory.give_up(me)
        parked.clear(root, memory)
        assert sorted(root.iterdir()) == sorted([filled, root / "another one's"])
    assert list(root.iterdir()) == [root / "another one's"]  # where nothing was parked, nothing stays


def test_what_is_parked_is_removed_after_a_boot(tmp_path: Path) -> None:
    (tmp_path / f"left{parked.SUFFIX}").mkdir()
    parked.clear(tmp_path, Memory(SIZE, tmp_path / "arena"))
    assert not list(tmp_path.iterdir())

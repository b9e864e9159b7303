"""Who leaves a GPU for a model that wakes: as few as needed, the idle ones first, never one that need not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.failure import Unavailable
from kybernate.seats.matrix import read_matrix
from kybernate.up.room import Gpu, Holder, Room, free_on, leaving

ONE = Gpu("GPU-1", 0, total=100, used=0)
TWO = Gpu("GPU-2", 1, total=100, used=0)
ON_ONE = frozenset({ONE.uuid})


def holder(name: str, bytes: int | None, used: float = 0.0, **more: object) -> Holder:
    return replace(Holder(name, ON_ONE, bytes, used), **more)  # type: ignore[arg-type]


def names(found: object) -> list[str]:
    return [one.name for one in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("holders", "needed", "leave"),
    [
        ([], 60, []),
        ([holder("a", 40)], 60, []),
        ([holder("a", 50)], 60, ["a"]),
        ([holder("a", 40, 2.0), holder("b", 40, 1.0)], 60, ["b"]),
        ([holder("a", 40, 1.0, busy=True), holder("b", 40, 2.0)], 60, ["b"]),
        ([holder("a", 40, 1.0, priority=1), holder("b", 40, 2.0)], 60, ["b"]),
        ([holder("a", 10), holder("b", 10)], None, ["a", "b"]),
        ([holder("a", None)], 1, ["a"]),
        ([replace(holder("a", 100), gpus=frozenset({TWO.uuid}))], 100, []),
    ],
)
def test_as_few_leave_as_needed(holders: list[Holder], needed: int | None, leave: list[str]) -> None:
    assert names(leaving([ONE], {}, holders, needed)) == leave


def test_other_programs_take_room() -> None:
    assert names(leaving([ONE], {ONE.uuid: 30}, [holder("a", 30)], 50)) == ["a"]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(0, 3)), max_size=6),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_what_stays_leaves_room_and_no_one_leaves_in_vain(
    held: list[tuple[int, bool, int]], foreign: int, needed: int
) -> None:
    holders = [holder(str(number), size, used, busy=busy) for number, (size, busy, used) in enumerate(held)]
    found = leaving([ONE], {ONE.uuid: foreign}, holders, needed)
    stay = [one for one in holders if one not in found]
    assert not stay or free_on(ONE, foreign, stay) >= needed
    if found:
        assert free_on(ONE, foreign, [*stay, found[-1]]) < needed


def test_wait_ends_when_the_other_has_left() -> None:
    there = [holder("a", 80, busy=True)]
    asked: list[str] = []

    async def look() -> list[Gpu]:
        return [ONE]

    async def wake() -> None:
        room = Room(look, lambda: there, asked.append)
        await room.measure()
        assert room.crowded("b", ["nvidia.com/gpu=0"], 50)

        async def goes() -> None:
            while not asked:  # noqa: ASYNC110  # each step of the loop is one of the other task
                await asyncio.sleep(0)
            there.clear()
            room.changed()

        task = asyncio.create_task(goes())
        async with room.taken("b", ["nvidia.com/gpu=0"], 50, seconds=10):
            assert asked == ["a"]
        await task

    asyncio.run(wake())


def test_one_that_does_not_leave_is_named() -> None:
    async def look() -> list[Gpu]:
        return [ONE]

    async def wake() -> None:
        room = Room(look, lambda: [holder("a", 80)], lambda name: None)
        async with room.taken("b", ["nvidia.com/gpu=all"], 50, seconds=0):
            pass

    with pytest.raises(Unavailable, match="b has no room: a did not leave"):
        asyncio.run(wake())


def test_matrix_bars_what_would_fit() -> None:
    async def look() -> list[Gpu]:
        return [ONE]

    async def crowded() -> list[bool]:
        room = Room(look, lambda: [holder("a", 1, busy=True)], lambda name: None)
        await room.measure()
        room.matrix = read_matrix({"sets": {"one": "a | b", "two": "a & c"}})
        return [room.crowded(name, ["nvidia.com/gpu=0"], 1) for name in ("b", "c", "d")]

    assert asyncio.run(crowded()) == [True, False, False]


def test_what_others_hold_is_known_before_the_first_rest() -> None:
    """Else all that restore after a reboot, which is no rest, are thought to fit together."""

    async def look() -> list[Gpu]:
        return [replace(ONE, used=70)]

    async def wake() -> None:
        room = Room(look, list, lambda name: None)
        room.changed()
        async with (
            room.taken("a", ["nvidia.com/gpu=0"], 15, seconds=0),
            room.taken("b", ["nvidia.com/gpu=0"], 15, seconds=0),
            room.taken("c", ["nvidia.com/gpu=0"], 15, seconds=0),
        ):
            pass

    with pytest.raises(Unavailable, match="c has no room: a"):
        asyncio.run(wake())


def test_arbiter_decides_where_there_are_seats() -> None:
    async def look() -> list[Gpu]:
        return [ONE]

    async def measured() -> None:
        seats = False
        room = Room(look, lambda: [holder("a", 100, busy=True)], lambda name: None, lambda: seats)
        devices = ["nvidia.com/gpu=0"]
        assert room.decided_here(devices, "large") == devices
        await room.measure()
        seats = True
        assert room.decided_here(devices, "") == devices
        assert room.crowded("b", devices, 50)
        assert not room.decided_here(devices, "large")
        assert not room.crowded("b", (), 50)

    asyncio.run(measured())


def test_one_that_does_not_wait_says_why_and_holds_nothing() -> None:
    there, asked = [holder("a", 80, busy=True)], []
    in_way: list[list[str]] = []

    async def look() -> list[Gpu]:
        return [ONE]

    def why_not(found: Sequence[Holder]) -> str:
        in_way.append(names(found))
        return "later"

    async def try_it() -> None:
        room = Room(look, lambda: there, asked.append)
        async with room.taken("b", ["nvidia.com/gpu=0"], 50, seconds=10, why_not=why_not) as why:
            assert why == "later"
            there.clear()
            async with room.taken("c", ["nvidia.com/gpu=0"], 100, seconds=0) as other:  # b holds nothing
                assert other == ""
                async with room.taken("b", ["nvidia.com/gpu=0"], 50, seconds=0, has_it=True) as has:
                    assert has == ""

    asyncio.run(try_it())
    assert in_way == [["a"]]
    assert asked == []


def test_room_taken_twice_is_held_until_both_have_ended() -> None:
    """A request's wake begins while the model's restore still ends."""

    async def look() -> list[Gpu]:
        return [ONE]

    async def wake() -> None:
        room = Room(look, list, lambda name: None)
        async with room.taken("a", ["nvidia.com/gpu=0"], 80, seconds=0):
            async with room.taken("a", ["nvidia.com/gpu=0"], 80, seconds=0):
                pass
            async with room.taken("b", ["nvidia.com/gpu=0"], 50, seconds=0):
                pass

    with pytest.raises(Unavailable, match="b has no room: a"):
        asyncio.run(wake())


def test_what_others_hold_is_measured_at_rest() -> None:
    async def look() -> list[Gpu]:
        return [replace(ONE, used=70)]

    async def measured() -> int:
        room = Room(look, lambda: [holder("a", 50)], lambda name: None)
        await room.measure()
        return room.foreign[ONE.uuid]

    assert asyncio.run(measured()) == 20

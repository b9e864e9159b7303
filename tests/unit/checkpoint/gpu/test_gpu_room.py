"""Room on GPUs: waiting for it, and which processes' bytes may go there before they do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from kybernate_shim.arena.control import PLACEHOLDERS
from kybernate_shim.checkpoint.gpu.room import (
    FIRST_BYTES,
    KEPT_FREE,
    ahead,
    ahead_in_room,
    arriving_room,
    await_room,
    needs,
)
from kybernate_shim.checkpoint.image.manifest import GpuMemory, UsedGpu
from kybernate_shim.gpu.claims import claimed
from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.gpu_map import GpuMismatch, GpuPlan
from kybernate_shim.gpu.helper_answers import CudaInfo, CudaProcess, NodeGpu, RoomComing, State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import Ahead

TOTAL = 800
LEFT = TOTAL // KEPT_FREE
PIDS = {1: 101, 2: 102}


def was(uuid: str, **held: int) -> UsedGpu:
    """Return a GPU of a checkpoint, and what its processes p1, p2 had there."""
    return UsedGpu(uuid, "H200", "580.1", tuple(GpuMemory(int(name[1:]), size) for name, size in held.items()))


def waits(pid: int, arena_bytes: int) -> CudaProcess:
    return CudaProcess(pid, State.CHECKPOINTED, pid, arena_bytes)


def test_placeholders_need_room_before_what_they_stand_in_for_and_give_it_up() -> None:
    gib = 1 << 30
    gpus, waiting = [was("a", p1=3 * gib)], [waits(101, 2 * gib)]
    assert needs(gpus, waiting, split=True) == ({"a": gib + PLACEHOLDERS}, {"a": 2 * gib - PLACEHOLDERS})
    assert needs(gpus, waiting, split=False) == ({"a": 3 * gib}, {})
    assert needs(gpus, [waits(101, 0)], split=True) == ({"a": 3 * gib}, {})
    small = 4 << 20
    assert needs([was("a", p1=small)], [waits(101, small)], split=True) == ({"a": small}, {"a": 0})


def now(uuid: str, free: int | None) -> NodeGpu:
    return NodeGpu(uuid, "H200", TOTAL, free, False)


def test_what_is_needed_stays_free_and_some_for_others() -> None:
    plan = GpuPlan((), {"a": 100})
    assert ahead([was("a", p1=100)], PIDS, plan, [now("a", 800)]) == [Ahead(101, "a", 100 + LEFT)]


@pytest.mark.parametrize("free", [0, 100, 100 + LEFT, None])
def test_gpu_with_nothing_to_spare_gets_nothing_early(free: int | None) -> None:
    assert ahead([was("a", p1=100)], PIDS, GpuPlan((), {"a": 100}), [now("a", free)]) == []


def test_processes_go_where_the_plan_moves_them() -> None:
    plan = GpuPlan((GpuPair("a", "b"), GpuPair("b", "a")), {"b": 100, "a": 60})
    found = ahead([was("a", p1=100), was("b", p2=60)], PIDS, plan, [now("a", 800), now("b", 800)])
    assert found == [Ahead(101, "b", 100 + LEFT), Ahead(102, "a", 60 + LEFT)]


def test_processes_of_several_gpus_and_of_nobody_knows_which_are_left_out() -> None:
    plan = GpuPlan((), {"a": 100, "b": 100})
    nodes = [now("a", 800), now("b", 800)]
    assert ahead([was("a", p1=50), was("b", p1=50, p2=50)], PIDS, plan, nodes) == [Ahead(102, "b", 100 + LEFT)]
    assert ahead([was("a"), was("b")], PIDS, plan, nodes) == []
    assert ahead([was("a", p3=50)], PIDS, plan, nodes) == []  # has ended since


def test_gpu_that_is_not_in_the_plan_gets_nothing() -> None:
    assert ahead([was("a", p1=50)], PIDS, GpuPlan((), {}), [now("a", 800)]) == []


class Gpu:
    """A helper of one GPU, which has more and more memory free each time it is asked."""

    def __init__(self, free: int, more: int) -> None:
        self._free, self._more = free, more

    async def info(self) -> CudaInfo:
        self._free += self._more
        return CudaInfo("580.1", 13000, (now("a", self._free),), ())


def test_room_that_somebody_has_for_a_moment_is_waited_for() -> None:
    node = asyncio.run(await_room(cast("CudaHelper", Gpu(0, 20)), {"a": 100}, seconds=10))
    assert [gpu.free_bytes for gpu in node] == [100]


def test_room_that_others_have_claimed_is_waited_for_until_they_have_taken_it(tmp_path: Path) -> None:
    """However long that takes: the GPU itself has the room."""

    async def main() -> None:
        async with (
            claimed({"a": 50}, alone_seconds=0, directory=tmp_path) as other,
            claimed({"a": 100}, directory=tmp_path) as mine,
        ):
            waiting = asyncio.create_task(await_room(cast("CudaHelper", Gpu(120, 0)), {"a": 100}, 0, mine))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            other.end()
            assert [gpu.free_bytes for gpu in await waiting] == [120]

    asyncio.run(main())


def test_room_beside_what_others_have_claimed_is_had_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            claimed({"a": 50}, alone_seconds=0, directory=tmp_path),
            claimed({"a": 100}, directory=tmp_path) as mine,
        ):
            found = await await_room(cast("CudaHelper", Gpu(150, 0)), {"a": 100}, 0, mine)
            assert [gpu.free_bytes for gpu in found] == [100]
            with pytest.raises(GpuMismatch, match="GPU a has 0 MiB free"):
                await await_room(cast("CudaHelper", Gpu(99, 0)), {"a": 100}, 0, mine)

    asyncio.run(main())


def test_room_that_comes_where_others_have_claimed_some_is_waited_for_as_a_whole() -> None:
    gib = 1 << 30
    assert arriving_room({"a": gib}, 5) == ({"a": FIRST_BYTES}, RoomComing("a", 5))
    assert arriving_room({"a": gib}, 5, alone=False) == ({"a": gib}, None)


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_room_that_does_not_come_is_told_of(seconds: float) -> None:
    with pytest.raises(GpuMismatch, match="GPU a has 0 MiB free"):
        asyncio.run(await_room(cast("CudaHelper", Gpu(0, 0)), {"a": 100}, seconds))


def test_one_process_with_bytes_in_the_arena_goes_ahead_into_room_that_comes() -> None:
    coming = RoomComing("a", 10)
    waiting = [waits(101, 50), waits(102, 0)]
    assert ahead_in_room(coming, waiting, {"a": 30}) == [Ahead(101, "a", 30, room_comes=True)]
    assert not ahead_in_room(None, waiting, {"a": 30})
    assert not ahead_in_room(coming, [waits(101, 50), waits(102, 1)], {"a": 30})

"""Calls that change processes: in turn at one, concurrently at several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.cuda_helper.holders import Holders
from kybernate_shim.cuda_helper.moved import Moved
from kybernate_shim.cuda_helper.service import CudaService, NodeSettings
from kybernate_shim.cuda_helper.turns import Turns
from kybernate_shim.cuda_helper.workers import Lifetime, Results, Workers
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.ttrpc import Call
from kybernate_shim.worker_protocol.cuda_jobs import DriverState, StateAnswer
from kybernate_shim.worker_protocol.messages import Job

ONE, TWO, THREE = 1 << 30, (1 << 30) + 1, (1 << 30) + 2
MOVES = {"Offload": "offload", "Reload": "reload"}


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def told(*calls: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Begin these calls in order; return which run in parallel, and in which order all do if each ends in turn."""

    async def story() -> tuple[list[int], list[int]]:
        turns, order = Turns(), []
        going = [asyncio.Event() for _ in calls]

        async def call(number: int, pids: Iterable[int]) -> None:
            async with turns.at(pids):
                order.append(number)
                await going[number].wait()

        tasks = [asyncio.ensure_future(call(number, pids)) for number, pids in enumerate(calls)]
        await settled()
        at_once = list(order)
        for event in going:
            event.set()
            await settled()
        await asyncio.gather(*tasks)
        assert not turns._locks
        return at_once, order

    return asyncio.run(story())


def test_one_process_has_one_call_after_the_other() -> None:
    assert told((ONE,), (ONE,), (ONE,)) == ([0], [0, 1, 2])


def test_other_processes_do_not_wait() -> None:
    assert told((ONE,), (TWO,), (ONE, THREE)) == ([0, 1], [0, 1, 2])


def test_calls_that_name_the_same_in_another_order_do_not_wait_for_each_other() -> None:
    at_once, order = told((ONE, TWO), (TWO, ONE), (TWO, TWO))
    assert (at_once, sorted(order)) == ([0], [0, 1, 2])


def test_call_that_is_cancelled_while_it_waits_keeps_nobody_waiting() -> None:
    async def story() -> None:
        turns = Turns()

        async def call(pids: Iterable[int]) -> None:
            async with turns.at(pids):
                pass

        async with turns.at([TWO]):
            waiting = asyncio.ensure_future(call([ONE, TWO]))
            await settled()
            waiting.cancel()
            await settled()
            await asyncio.wait_for(call([ONE]), 10)

    asyncio.run(story())


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], CudaService]:
    """Make a helper whose driver says of every process that it runs, and whose verbs all succeed."""

    async def answer(jobs: Mapping[int, Job[Any]], seconds: float) -> Results[StateAnswer]:
        return Results(dict.fromkeys(jobs, StateAnswer(state=DriverState.RUNNING)))

    def make() -> CudaService:
        log = structlog.get_logger()
        settings = NodeSettings(LiveConfig(log, tmp_path / "shim.toml"), {})
        workers, holders = Workers(Lifetime(tmp_path / "lifetime")), Holders(tmp_path / "holders", [])
        helper = CudaService(workers, holders, settings, tmp_path / "arena", log)
        monkeypatch.setattr(helper, "_call", answer)
        return helper

    return make


@pytest.mark.parametrize("move", MOVES)
def test_move_to_or_from_the_arena_is_not_looked_into(
    helper: Callable[[], CudaService], monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    """The driver is unlocked meanwhile, and the threads are stopped: no shim may act on the state "running"."""

    async def story() -> None:
        made, going = helper(), asyncio.Event()

        async def moves(pid: int, seconds: float, **how: object) -> Moved:
            await going.wait()
            return Moved()

        monkeypatch.setattr(made.arena_manager, MOVES[move], moves)
        methods = made.services()["kybernate.cuda.v1.Cuda"]

        async def call(name: str, request: Any) -> Any:
            return await methods[name].handle(request, cast(Call, None))

        moving = asyncio.ensure_future(call(move, wire.VerbRequest(pids=[ONE], timeout_ms=1000)))
        await settled()
        unlock = asyncio.ensure_future(call("Unlock", wire.VerbRequest(pids=[ONE], timeout_ms=1000)))
        await settled()
        reply = await call("States", wire.StatesRequest(pids=[ONE, TWO], timeout_ms=1000))
        assert {one.pid: one.state for one in reply.processes} == {ONE: wire.LOCKED, TWO: wire.RUNNING}
        assert not unlock.done()
        going.set()
        await asyncio.gather(moving, unlock)
        reply = await call("States", wire.StatesRequest(pids=[ONE], timeout_ms=1000))
        assert [one.state for one in reply.processes] == [wire.RUNNING]

    asyncio.run(story())

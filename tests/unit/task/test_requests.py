"""Each named operation is carried out once: every later request gets the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Busy, Failed, Taken
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task.outcomes import Ledger, Outcome
from kybernate_shim.task.requests import Requests
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.task.runtime import settled


class Asked:
    """Requests for one container, whose work is counted and ends when a test says so."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.requests = Requests("c", self.ledger)
        self.done: list[str] = []
        self.held: dict[str, asyncio.Event] = {}
        self.error: Exception | None = None

    def ask(self, id: str, **fields: object) -> asyncio.Task[object]:
        request = wire.SuspendRequest(id="c", operation=id, **fields)  # type: ignore[arg-type]
        return asyncio.ensure_future(self.requests.once(id, "suspend", request, self.work(id)))

    def work(self, id: str) -> Callable[[], Awaitable[wire.SuspendResponse]]:
        async def work() -> wire.SuspendResponse:
            if isinstance(self.error, Busy):
                raise self.error  # before it begins
            self.requests.begin_by(asyncio.current_task())
            self.done.append(id)
            try:
                await self.held.setdefault(id, asyncio.Event()).wait()
                if self.error is not None:
                    raise self.error
            finally:
                self.ledger.add(Outcome(id, "suspend", "failed" if self.error else "succeeded", 0, 0))
            return wire.SuspendResponse(vram_bytes=len(self.done))

        return work

    def finish(self, id: str) -> None:
        self.held.setdefault(id, asyncio.Event()).set()


def test_same_request_while_it_runs_waits_for_the_same_end() -> None:
    async def story() -> None:
        asked = Asked()
        first, second = asked.ask("x"), asked.ask("x")
        await settled()
        third = asked.ask("x")
        await settled()
        assert asked.done == ["x"]
        asked.finish("x")
        assert {(await task).vram_bytes for task in (first, second, third)} == {1}  # type: ignore[attr-defined]
        assert asked.done == ["x"]

    asyncio.run(story())


def test_same_request_afterwards_gets_the_same_answer() -> None:
    async def story() -> None:
        asked = Asked()
        asked.finish("x")
        before = await asked.ask("x")
        assert await asked.ask("x") == before
        assert asked.done == ["x"]

    asyncio.run(story())


def test_same_request_after_a_failure_gets_the_same_error() -> None:
    async def story() -> None:
        asked = Asked()
        asked.finish("x")
        asked.error = Failed("the driver said no")
        errors = []
        for _ in range(2):
            with pytest.raises(RpcError, match="the driver said no") as failed:
                await asked.ask("x")
            errors.append(failed.value)
            asked.error = None
        assert [error.code for error in errors] == [Code.INTERNAL] * 2
        assert asked.done == ["x"]

    asyncio.run(story())


def test_caller_that_goes_away_takes_nothing_along() -> None:
    async def story() -> None:
        asked = Asked()
        gone = asked.ask("x")
        await settled()
        gone.cancel()
        await asyncio.wait({gone})
        asked.finish("x")
        assert await asked.ask("x") == wire.SuspendResponse(vram_bytes=1)
        assert asked.done == ["x"]

    asyncio.run(story())


def test_request_that_was_refused_before_it_began_can_be_repeated() -> None:
    async def story() -> None:
        asked = Asked()
        asked.finish("x")
        asked.error = Busy("another operation runs")
        with pytest.raises(RpcError, match="another operation runs"):
            await asked.ask("x")
        asked.error = None
        await asked.ask("x")
        assert asked.done == ["x"]

    asyncio.run(story())


def test_requests_without_a_name_are_each_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        asked.finish("")
        await asked.ask("")
        await asked.ask("")
        assert asked.done == ["", ""]

    asyncio.run(story())


def test_name_of_another_request_is_taken() -> None:
    async def story() -> None:
        asked = Asked()
        running = asked.ask("x")
        await settled()
        for verb, request in (("resume", wire.ResumeRequest(id="c")), ("suspend", wire.SuspendRequest(id="d"))):
            with pytest.raises(Taken, match=f"is another suspend: the {verb} was not begun"):
                await asked.requests.once("x", verb, request, asked.work("x"))
        asked.finish("x")
        await running
        with pytest.raises(Taken, match="was not begun"):
            await asked.requests.once("x", "resume", wire.ResumeRequest(id="c"), asked.work("x"))
        assert asked.done == ["x"]

    asyncio.run(story())


def test_repetition_may_have_less_time_left() -> None:
    async def story() -> None:
        asked = Asked()
        first = asked.ask("x", timeout_ms=5000)
        await settled()
        second = asked.ask("x", timeout_ms=100)
        asked.finish("x")
        assert await first == await second

    asyncio.run(story())


@pytest.mark.parametrize("running", [False, True])
def test_request_that_waits_for_its_container_can_be_cancelled(running: bool) -> None:
    """Also before its task has run at all."""

    async def story() -> None:
        asked, lock = Asked(), asyncio.Lock()
        await lock.acquire()

        async def work() -> wire.SuspendResponse:
            async with lock:
                raise AssertionError("it began")

        request = wire.SuspendRequest(id="c", operation="x")
        callers = [asyncio.ensure_future(asked.requests.once("x", "suspend", request, work)) for _ in range(2)]
        await asyncio.sleep(0)
        if running:
            await settled()
        (waiting,) = asked.requests.waiting
        outcome = await waiting.cancel("uid 0")
        assert outcome is await waiting.cancel("uid 1")
        assert (outcome.id, outcome.ending, outcome.code) == ("x", "cancelled", "CANCELED")
        for caller in callers:
            with pytest.raises(RpcError, match="cancelled by uid 0 before it began; nothing was changed") as failed:
                await caller
            assert failed.value.code is Code.CANCELED
        assert asked.ledger.outcomes == (outcome,)
        assert asked.requests.waiting == []
        with pytest.raises(RpcError, match="cancelled by uid 0"):
            await asked.requests.once("x", "suspend", request, work)
        lock.release()
        async with asyncio.timeout(10), lock:
            pass  # no waiter that is gone keeps it

    asyncio.run(story())


steps = st.lists(st.tuples(st.sampled_from(["ask", "finish"]), st.sampled_from("abc")), max_size=30)


@given(steps)
def test_named_operation_is_carried_out_once(steps: list[tuple[str, str]]) -> None:
    async def story() -> None:
        asked = Asked()
        tasks = []
        for what, id in steps:
            if what == "ask":
                tasks.append(asked.ask(id))
            else:
                asked.finish(id)
            await settled()
        for id in "abc":
            asked.finish(id)
        await asyncio.gather(*tasks)
        assert sorted(asked.done) == sorted({id for what, id in steps if what == "ask"})

    asyncio.run(story())

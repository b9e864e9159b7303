"""What becomes of held requests when clients hang up, wakes are overtaken, and the agent says a thing late or twice."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kybernate.node.failure import Failure
from kybernate.proxy import engine as engines
from kybernate.proxy.engine import Engine, Refused
from kybernate.proxy.holding import Held, Phase
from kybernate.proxy.metrics import Metrics
from kybernate.proxy.models import SuspendFailed, WakeFailed
from kybernate.proxy.settings import Model
from kybernate_shim.logs import Log

MODEL = Model("m", "http://127.0.0.1:1", container="c", retry_after=1.0)
TURNS = 1000  # of the loop, in which all ends that ends: nothing here waits for anything else


class Source:
    """Models of which a test says everything: what the watch yields, and how each wake and suspend ends."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Phase | Exception] = asyncio.Queue()
        self.wakes: list[asyncio.Future[None]] = []
        self.suspends: list[asyncio.Future[None]] = []

    async def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        while True:
            one = await self.said.get()
            if isinstance(one, Exception):
                raise one
            yield "m", one

    async def wake(self, model: Model) -> None:
        self.wakes.append(future := asyncio.get_running_loop().create_future())
        await future

    async def suspend(self, model: Model, *, unless_used: bool) -> None:
        self.suspends.append(future := asyncio.get_running_loop().create_future())
        await future

    async def report(self, model: Model, in_flight: int) -> bool:
        return False


class World:
    """An engine that follows its source. `port_accepts` is set while the model's port does."""

    def __init__(self, model: Model) -> None:
        self.source, self.log = Source(), io.StringIO()
        self.engine = Engine(self.source, [model], Metrics(["m"]), Log(lambda line: self.log.write(line + "\n"), 0, {}))
        self.port_accepts = asyncio.Event()
        self.port_accepts.set()

    @property
    def held(self) -> Held:
        return self.engine.held["m"]

    async def say(self, *phases: Phase) -> None:
        """Let the watch say phases, and return once the engine has taken them."""
        for phase in phases:
            self.source.said.put_nowait(phase)
        await self.until(self.source.said.empty)
        await asyncio.sleep(0)

    async def awake(self) -> None:
        await self.say(Phase.AWAKE)
        await self.until(lambda: self.held.phase == Phase.AWAKE)

    async def asks(self) -> asyncio.Task[Any]:
        """Begin a request, and return once it waits."""
        before = len(self.held.waiting)
        task = asyncio.create_task(self.engine.wait("m"))
        await self.until(lambda: len(self.held.waiting) == before + 1)
        return task

    @staticmethod
    async def until(condition: Callable[[], Any]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("never true")


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[World], Awaitable[None]], model: Model = MODEL) -> None:
    async def running() -> None:
        world = World(model)

        async def port_accepts(upstream: str) -> None:
            await world.port_accepts.wait()

        monkeypatch.setattr(engines, "port_accepts", port_accepts)
        monkeypatch.setattr(engines, "WATCH_PAUSE", 0.0)
        following = asyncio.create_task(world.engine.run())
        try:
            await test(world)
        finally:
            following.cancel()
            await world.engine.close()

    asyncio.run(running())


def test_request_that_is_released_as_its_client_hangs_up_costs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.awake()
        first = world.engine.try_pass("m")
        assert first is not None
        gone, waits = await world.asks(), await world.asks()
        gone.cancel()  # in the same turn of the loop
        first.__exit__(None, None, None)
        with await waits:
            assert world.held.in_flight == 1
        assert world.held.in_flight == 0
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(monkeypatch, test, Model("m", "http://127.0.0.1:1", container="c", concurrency=1))


def test_wake_of_a_container_that_is_gone_does_not_end_the_wake_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is no failure of what the container was made of again."""

    async def test(world: World) -> None:
        await world.say(Phase.ASLEEP)
        waits = await world.asks()
        await world.until(lambda: len(world.source.wakes) == 1)
        await world.say(Phase.ABSENT)
        await world.until(lambda: len(world.source.wakes) == 2)
        old, new = world.source.wakes
        if not old.done():
            old.set_exception(WakeFailed("the container has ended"))
        new.set_result(None)
        with await waits:
            assert world.held.phase == Phase.AWAKE

    run(monkeypatch, test)


def test_port_of_a_container_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        world.port_accepts.clear()
        await world.say(Phase.AWAKE)  # something else has woken it
        waits = await world.asks()
        await world.say(Phase.ABSENT)
        await world.until(lambda: len(world.source.wakes) == 1)
        assert world.held.phase == Phase.WAKING
        world.source.wakes[0].set_exception(WakeFailed("nothing to make it of", absent=True))
        with pytest.raises(Refused):
            await waits
        world.port_accepts.set()
        await asyncio.sleep(0)
        assert world.held.phase == Phase.ABSENT

    run(monkeypatch, test)


def test_model_that_is_suspended_before_its_port_accepts_is_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By something else, after this wake: its port accepts while it is frozen, and its requests would hang."""

    async def test(world: World) -> None:
        world.port_accepts.clear()
        waits = await world.asks()
        await world.until(lambda: len(world.source.wakes) == 1)
        world.source.wakes[0].set_result(None)
        await world.say(Phase.AWAKE, Phase.SUSPENDING, Phase.ASLEEP)
        world.port_accepts.set()
        await world.until(lambda: len(world.source.wakes) == 2)
        assert not waits.done()
        world.source.wakes[1].set_result(None)
        with await waits:
            assert world.held.phase == Phase.AWAKE

    run(monkeypatch, test)


def test_watch_that_is_late_does_not_undo_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how the model came to sleep when that is over."""

    async def test(world: World) -> None:
        waits = await world.asks()
        await world.until(lambda: len(world.source.wakes) == 1)
        await world.say(Phase.SUSPENDING, Phase.ASLEEP)
        world.source.wakes[0].set_result(None)
        with await waits:
            assert len(world.source.wakes) == 1

    run(monkeypatch, test)


def test_model_that_sleeps_although_its_suspend_failed_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is killed when the watch has said that the model sleeps, and the suspend has not ended."""

    async def test(world: World) -> None:
        await world.awake()
        world.engine.want_suspended("m")
        await world.until(lambda: len(world.source.suspends) == 1)
        await world.say(Phase.SUSPENDING, Phase.ASLEEP)
        world.source.suspends[0].set_exception(SuspendFailed("no agent answers"))
        await world.until(lambda: world.held.phase != Phase.SUSPENDING)
        assert world.engine.try_pass("m") is None
        waits = await world.asks()
        await world.until(lambda: len(world.source.wakes) == 1)
        world.source.wakes[0].set_result(None)
        with await waits:
            pass

    run(monkeypatch, test)


@pytest.mark.parametrize("last", [Phase.SUSPENDING, Phase.AWAKE])
def test_model_that_a_failed_suspend_has_left_at_work_is_awake(monkeypatch: pytest.MonkeyPatch, last: Phase) -> None:
    async def test(world: World) -> None:
        await world.awake()
        world.engine.want_suspended("m")
        await world.until(lambda: len(world.source.suspends) == 1)
        await world.say(Phase.SUSPENDING, last)
        world.source.suspends[0].set_exception(SuspendFailed("no room in memory"))
        await world.until(lambda: world.held.phase == Phase.AWAKE)

    run(monkeypatch, test)


def test_model_that_something_wakes_during_its_suspend_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.awake()
        world.engine.want_suspended("m")
        await world.until(lambda: len(world.source.suspends) == 1)
        await world.say(Phase.SUSPENDING, Phase.ASLEEP, Phase.AWAKE)
        world.source.suspends[0].set_result(None)
        await world.until(lambda: world.held.phase == Phase.AWAKE)
        assert not world.source.wakes

    run(monkeypatch, test)


def test_defect_in_a_wake_is_a_wake_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose work ends in any way is not left between two states, where its requests would wait."""

    async def test(world: World) -> None:
        waits = await world.asks()
        await world.until(lambda: len(world.source.wakes) == 1)
        world.source.wakes[0].set_exception(ValueError("a defect"))
        with pytest.raises(Refused) as refused:
            await waits
        assert refused.value.refusal.status == 503
        assert "a defect" in world.log.getvalue()

    run(monkeypatch, test)


def test_defect_in_a_suspend_leaves_the_model_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        await world.awake()
        world.engine.want_suspended("m")
        await world.until(lambda: len(world.source.suspends) == 1)
        world.source.suspends[0].set_exception(ValueError("a defect"))
        await world.until(lambda: world.held.phase == Phase.AWAKE)
        assert "a defect" in world.log.getvalue()

    run(monkeypatch, test)


@pytest.mark.parametrize("error", [Failure("no agent answers"), ValueError("a defect")])
def test_watch_that_ends_is_begun_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def test(world: World) -> None:
        await world.awake()
        world.source.said.put_nowait(error)
        await world.say(Phase.ABSENT)
        await world.until(lambda: world.held.phase == Phase.ABSENT)
        assert str(error) in world.log.getvalue()

    run(monkeypatch, test)

"""Parts start in one order, are watched, and stop in the reverse one, however the agent ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from kybernate.agent.part import Part, Parts, Work
from kybernate.agent.settings import Settings
from kybernate.node.failure import Failure


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def error(self, event: str, **fields: Any) -> None:
        self.events.append(event)


class Recorded(Part):
    """Notes what is done with it."""

    def __init__(self, name: str, said: list[str], *, fails: str = "") -> None:
        super().__init__()
        self.name, self.said, self.fails = name, said, fails
        self.closing.callback(said.append, f"{name} is closed")

    async def start(self) -> None:
        self.said.append(f"{self.name} starts")
        if self.fails == "start":
            raise Failure(f"{self.name} cannot start")

    def work(self) -> Iterable[Work]:
        yield self._work()

    async def _work(self) -> None:
        try:
            if self.fails == "work":
                raise ValueError(self.name)
            await asyncio.Event().wait()
        finally:
            self.said.append(f"work of {self.name} ends")

    async def reload(self, before: Settings) -> None:
        self.said.append(f"{self.name} is reloaded")

    async def drain(self, seconds: float) -> None:
        self.said.append(f"{self.name} is drained")


def test_parts_stop_in_the_reverse_order_after_their_work() -> None:
    said: list[str] = []

    async def live() -> None:
        parts = Parts([Recorded("a", said), Recorded("b", said)], Log())
        await parts.start()
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_soon(stopping.set)
        await parts.until(stopping)
        await parts.reload(Settings())
        await parts.drain(1.0)
        await parts.stop()

    asyncio.run(live())
    assert said == [
        "a starts",
        "b starts",
        "a is reloaded",
        "b is reloaded",
        "b is drained",
        "a is drained",
        "work of b ends",
        "b is closed",
        "work of a ends",
        "a is closed",
    ]


def test_part_that_cannot_start_stops_those_before_it() -> None:
    said: list[str] = []

    async def live() -> None:
        parts = Parts([Recorded("a", said), Recorded("b", said, fails="start"), Recorded("c", said)], Log())
        try:
            await parts.start()
        finally:
            await parts.drain(1.0)
            await parts.stop()

    with pytest.raises(Failure, match="b cannot start"):
        asyncio.run(live())
    assert [one for one in said if "work" not in one] == [
        "a starts", "b starts", "a is drained", "b is closed", "a is closed",
    ]  # fmt: skip


@pytest.mark.parametrize("waits", ["in a start", "for the end"])
def test_work_that_fails_ends_the_agent_also_while_a_later_part_starts(waits: str) -> None:
    log = Log()

    class Waiting(Part):
        async def start(self) -> None:
            await asyncio.Event().wait()

    async def live() -> None:
        parts = Parts([Recorded("a", [], fails="work"), *([Waiting()] if waits == "in a start" else [])], log)
        try:
            await parts.start()
            await parts.until(asyncio.Event())
        finally:
            await parts.stop()

    with pytest.raises(Failure, match="a"):
        asyncio.run(live())
    assert log.events == ["agent.failed"]

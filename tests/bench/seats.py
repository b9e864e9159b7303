"""How soon the arbiter of seats acts, and how soon a program computes again, against a stop and a start of it.

`seats.latency` is from a request to the first action on a node with 64 seats on 8 GPUs, all taken, by the arbiter's
loop alone: p99, against its bar. `seats.wake` is from `kybernate wake` of a container whose GPU another one has until
it computes; `stock` stops that one by its end, and starts the program again, as programs do that know no suspend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from kybernate.agent.seats.acting import Outcome
from kybernate.agent.seats.claims import Key
from kybernate.seats.model import Rules
from tests.bench.figures import Pair
from tests.system import gpu
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.programs import Computing
from tests.system.gpu.seats import SEATED, seats_agent
from tests.system.node_agent import short_place
from tests.unit.agent.seats.fake_seats import FakeNode, until

NAMES = ("seats.latency", "seats.wake")
GPUS, SEATS, REQUESTS = 8, 8, 200
MOST_MS = 20.0
MIB = 64


class Timed(FakeNode):
    """Notes when its arbiter acts first."""

    acted = 0.0

    async def suspend(self, seat: str, key: Key) -> Outcome:
        self.acted = self.acted or time.perf_counter()
        return await super().suspend(seat, key)

    async def swap(self, seat: str, out: Key, key: Key) -> Outcome:
        self.acted = self.acted or time.perf_counter()
        return await super().swap(seat, out, key)


def pairs() -> Iterator[Pair]:
    yield Pair(NAMES[0], lambda: asyncio.run(_latency()), partial(float, MOST_MS), 1.0, "ms", within=SEATS * GPUS)
    with ExitStack() as stack:
        node: list[tuple[Ctr, Computing]] = []

        def waking() -> float:
            if not node:
                node.append(_node(stack))
            return _wake(*node[0])

        yield Pair(NAMES[1], waking, _stop_and_start, 1.0, "s", within=MIB)


async def _latency() -> float:
    """Return the 99th percentile of the time from a request to the first action, in milliseconds."""
    node = Timed(gpus=GPUS)
    keys = [
        node.add(f"c{index}-{number}", "attached" if number == 0 else "suspended", seat=f"g{index}-s{number}")
        for index in range(GPUS)
        for number in range(SEATS)
    ]
    found = []
    rules = Rules(minimum_residency=0, yield_after=0, idle_after=0, ram_low=0, ram_high=0)
    async with node.arbitrating(rules, seats=SEATS) as arbiter:
        await until(lambda: all(map(node.status, keys)))
        for number in range(REQUESTS):
            sleeping = [key for key in keys if node.status(key) == "suspended"]
            key, node.acted = sleeping[number * 7 % len(sleeping)], 0.0
            begun = time.perf_counter()
            arbiter.ask(key, "api")
            await until(partial(lambda key: node.status(key) == "active", key))
            found.append(node.acted - begun)
    return sorted(found)[int(len(found) * 0.99)] * 1000


def _node(stack: ExitStack) -> tuple[Ctr, Computing]:
    gpu.install_driver()
    stack.callback(gpu.remove_driver)
    stack.callback(gpu.forget_helper)
    place = stack.enter_context(short_place())
    stack.enter_context(seats_agent(place))
    ctr = Ctr()
    first = stack.enter_context(gpu.computing(ctr, *gpu.command(mib=MIB), flags=SEATED))
    stack.enter_context(gpu.computing(ctr, *gpu.command(mib=MIB), flags=SEATED))
    return ctr, first


def _wake(ctr: Ctr, container: Computing) -> float:
    """Put the container to sleep, wake it in the place of the other one, and return the seconds until it computes."""
    from kybernate.client import Agent

    with Agent() as agent:
        agent.sleep(container.id).result(timeout=60)
        others = [one.container for one in agent.seats() if one.container != container.id]
        agent.wake(others[0]).result(timeout=60)
        before = container.steps()[0]
        begun = time.perf_counter()
        agent.wake(container.id).result(timeout=60)
        eventually(lambda: container.steps()[0] > before, pause=0.002)
        return time.perf_counter() - begun


def _stop_and_start() -> float:
    """Return the seconds in which a program ends and another one computes in its place."""
    ctr = Ctr()
    with ExitStack() as stack:
        first = stack.enter_context(gpu.computing(ctr, *gpu.command(mib=MIB)))
        begun = time.perf_counter()
        ctr.remove(first.id)
        stack.enter_context(gpu.computing(ctr, *gpu.command(mib=MIB)))
        return time.perf_counter() - begun

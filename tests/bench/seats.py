"""How soon the arbiter of seats acts, and how programs share a GPU by it, against what is done without it.

`seats.latency` is from a request to the first action on a node with 64 seats on 8 GPUs, all taken, by the arbiter's
loop alone: p99, against its bar, with a CPU for it where the machine allows that. `seats.wake` is from
`kybernate wake` of a container whose GPU another one has until it computes. `seats.goodput` has four programs on one
GPU, and requests at random times (Poisson): the seconds for each request that is answered within BOUND, less for a
better one. Both are compared with two ways:

- a stop of the one program and a start of the other, as of programs that know no suspend;
- the driver's lock, checkpoint, restore and unlock, one program after the other (`.driver`), with nothing around them.

The pretended driver copies in the machine's memory, and its programs start in no time, unlike servers that load a
model: what is compared is what is around the copies.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from kybernate.agent.seats.acting import Outcome
from kybernate.agent.seats.claims import Key
from kybernate.client import Agent
from kybernate.seats.model import Rules
from kybernate_shim.gpu.helper_client import cuda_helper
from tests.bench.figures import Pair
from tests.system import gpu
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.programs import Computing
from tests.system.gpu.seats import SEATED, seats_agent
from tests.system.node_agent import short_place
from tests.unit.agent.seats.fake_seats import FakeNode, until

NAMES = ("seats.latency", "seats.wake", "seats.wake.driver", "seats.goodput", "seats.goodput.driver")
GPUS, SEATS, REQUESTS = 8, 8, 200
MOST_MS = 20.0
MIB, PROGRAMS = 64, 4
ARRIVALS, PER_SECOND, WORK_SECONDS, BOUND = 40, 0.5, 0.3, 5.0  # requests, of all programs together, work of each, bound
SLICE = 0.4  # of a program that works for a request
RULES = f"minimumResidency: 0, slice: {SLICE}, yieldAfter: 0, idleAfter: 0, reserve: 8Mi, ramLow: 0, ramHigh: 0"
FLAGS = [*SEATED, "--annotation", "kybernate.io/wake-on-use=false"]  # its program computes without end, and would ask


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
    yield Pair(NAMES[0], _latency_alone, partial(float, MOST_MS), 1.0, "ms", within=SEATS * GPUS)
    with _node() as node:
        yield Pair("seats.wake", node.wake, node.stop_and_start, 1.0)
        yield Pair("seats.wake.driver", node.wake, node.switch, None)
        ours = partial(_goodput, node.serve, ARRIVALS)
        yield Pair("seats.goodput", ours, partial(_goodput, node.serve_by_start, 1), 1.0, within=ARRIVALS)
        yield Pair("seats.goodput.driver", ours, partial(_goodput, node.serve_by_driver, 1), None, within=ARRIVALS)


def _latency_alone() -> float:
    """Return the latency before all other programs: the bar is no ratio, so that load would fall on one side alone."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return asyncio.run(_latency())
    try:
        return asyncio.run(_latency())
    finally:
        os.sched_setscheduler(0, *before)


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


class Node:
    """A node with one GPU for all: programs with seats, programs that the driver alone switches, and one at a time."""

    def __init__(self, seated: Sequence[Computing], plain: Sequence[Computing], stack: ExitStack) -> None:
        """All but the last of the `plain` ones are off the GPU; `stack` ends what is started."""
        self._seated, self._plain, self._ctr = seated, plain, Ctr()
        self._pids = [one.pids() for one in plain]
        self._active = len(plain) - 1
        self._started, self._running = ExitStack(), -1
        stack.callback(lambda: self._started.close())
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    # ---- by seats

    def wake(self) -> float:
        """Wake a container in the place of another one, and return the seconds until it computes."""
        with Agent() as agent:
            first, second = self._seated[:2]
            agent.sleep(first.id).result(timeout=60)
            agent.wake(second.id).result(timeout=60)
            time.sleep(SLICE)  # which it has for itself
            begun = time.perf_counter()
            with _computing(first):
                agent.wake(first.id).result(timeout=60)
            return time.perf_counter() - begun

    def serve(self, program: int) -> float:
        """Answer a request as a proxy does, and return when the program computed."""
        container = self._seated[program]
        with Agent() as agent:
            self._report(agent, container, 1)
            try:
                with _computing(container):
                    agent.wake(container.id).result(timeout=120)
                computed = time.perf_counter()
                time.sleep(WORK_SECONDS)
            finally:
                self._report(agent, container, -1)
        return computed

    def _report(self, agent: Agent, container: Computing, change: int) -> None:
        with self._lock:
            self._open[container.id] += change
            agent.report_activity(container.id, in_flight=self._open[container.id])

    # ---- by stops and starts

    def stop_and_start(self) -> float:
        """Return the seconds in which a program ends and another one computes in its place."""
        with gpu.computing(self._ctr, *gpu.command(mib=MIB), polls=False) as first:
            begun = time.perf_counter()
            self._ctr.remove(first.id)
            with gpu.computing(self._ctr, *gpu.command(mib=MIB), polls=False):
                return time.perf_counter() - begun

    def serve_by_start(self, program: int) -> float:
        if program != self._running:
            self._started.close()
            self._started = ExitStack()
            self._started.enter_context(gpu.computing(self._ctr, *gpu.command(mib=MIB), polls=False))
            self._running = program
        computed = time.perf_counter()
        time.sleep(WORK_SECONDS)
        return computed

    # ---- by the driver alone

    def switch(self) -> float:
        """Have the driver switch two programs, and return the seconds until the second one computes."""
        begun = time.perf_counter()
        with _computing(self._plain[1 - self._active % 2]):
            self._bring(1 - self._active % 2)
        return time.perf_counter() - begun

    def serve_by_driver(self, program: int) -> float:
        with _computing(self._plain[program]):
            self._bring(program)
        computed = time.perf_counter()
        time.sleep(WORK_SECONDS)
        return computed

    def _bring(self, program: int) -> None:
        if program != self._active:
            asyncio.run(_switch(self._pids[self._active], self._pids[program]))
            self._active = program


async def _switch(out: Sequence[int], back: Sequence[int]) -> None:
    async with cuda_helper() as helper:
        await helper.lock(out, 60)
        await helper.checkpoint(out, 600)
        await helper.restore(back, 600)
        await helper.unlock(back, 60)


async def _leave(pids: Sequence[int]) -> None:
    async with cuda_helper() as helper:
        await helper.lock(pids, 60)
        await helper.checkpoint(pids, 600)


@contextmanager
def _computing(container: Computing) -> Iterator[None]:
    """Do the block, and wait until the container has computed since its beginning: each step is a line of its log."""
    before = container.log.stat().st_size
    yield
    eventually(lambda: container.log.stat().st_size > before, seconds=60, pause=0.002)


def _goodput(serve: Callable[[int], float], side_by_side: int) -> float:
    """Return the seconds for each request that is answered within the bound; those of each way are the same."""
    chance = random.Random(1)
    begun = at = time.perf_counter()
    with ThreadPoolExecutor(side_by_side) as pool:
        answers = []
        for _ in range(ARRIVALS):
            at += chance.expovariate(PER_SECOND)
            time.sleep(max(0.0, at - time.perf_counter()))
            answers.append((at, pool.submit(serve, chance.randrange(PROGRAMS))))
        within = sum(answer.result() - asked <= BOUND for asked, answer in answers)
    return (time.perf_counter() - begun) / max(1, within)


@contextmanager
def _node() -> Iterator[Node]:
    with ExitStack() as stack:
        gpu.install_driver()
        stack.callback(gpu.remove_driver)
        stack.callback(gpu.forget_helper)
        stack.enter_context(seats_agent(stack.enter_context(short_place()), rules=RULES))
        ctr, command = Ctr(), gpu.command(mib=MIB)
        seated = [stack.enter_context(gpu.computing(ctr, *command, flags=FLAGS, polls=False)) for _ in range(PROGRAMS)]
        plain: list[Computing] = []
        for _ in range(PROGRAMS):
            if plain:
                asyncio.run(_leave(plain[-1].pids()))
            plain.append(stack.enter_context(gpu.computing(ctr, *command, polls=False)))
        yield Node(seated, plain, stack)

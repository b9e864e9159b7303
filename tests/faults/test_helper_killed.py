"""The helper is killed at each call that an operation makes, and its processes at any moment: no container is lost.

KYBERNATE_FAULT picks calls by a part of their name, as for the matrix, all of them where it is ":"; KYBERNATE_KILLS is
how many processes are killed at moments that KYBERNATE_FAULTS_SEED chooses.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.sequence import StepSeconds, Suspended
from tests.contract.cuda_driver.helper_processes import kill as kill_processes
from tests.faults.bench import PATIENCE, Bench
from tests.faults.matrix import Fault, sites
from tests.faults.operations import LIMITS, OPERATIONS, Operation, leave, recover
from tests.faults.test_matrix import SEED, Benches, dry_run
from tests.faults.trial import Trial, everything_in

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]
THROUGH_ARENA = ("suspend several", "resume several", "prefetch", "swap")
MOST = 12  # calls of an operation
KILLS = 8
MOST_HOLDERS = 3  # calls of an operation at which the holders are killed
HELD = ("a", "b")  # the programs with the library
CHANCES = ("helper", "helper", "arena's worker", "worker")


@dataclass
class Killed(Trial):
    """The helper is killed while the call waits, which continues then."""

    async def _attempt(self) -> tuple[CudaError | None, Sequence[Suspended]]:
        gpus = self.bench.gpus
        gpus.record()
        gpus.switch(self._switch())
        operation = asyncio.ensure_future(self.operation.act(self.bench, LIMITS))
        try:
            await self._reach(operation)
            await asyncio.to_thread(self._kill)
        finally:
            await self._go_on(operation)
        try:
            return None, await operation
        except CudaError as error:
            self.error = everything_in(error)
            return error, []

    def _kill(self) -> None:
        self.bench.kill_helper()

    async def _go_on(self, operation: asyncio.Future[Sequence[Suspended]]) -> None:
        """End the wait of the call, also of one that was just about to begin it."""
        self.bench.gpus.switch("")
        while not (await asyncio.wait([operation], timeout=1.0))[0]:
            self.bench.gpus.switch("")

    async def _reach(self, operation: asyncio.Future[Sequence[Suspended]]) -> None:
        names = {tenant.pid: name for name, tenant in self.bench.tenants.items()}
        async with asyncio.timeout(PATIENCE):
            while not self.reached and not operation.done():
                made = Counter(sites(self.bench.gpus.calls(), names))
                self.reached = made[self.fault.who, self.fault.call] >= self.fault.nth
                await asyncio.sleep(0.005)

    def _limits(self) -> StepSeconds:
        return LIMITS


@dataclass
class HolderKilled(Killed):
    """The holders are killed while the call waits; the kernel kills the programs that they hold, and only these."""

    lost: list[str] = field(default_factory=list)

    def _kill(self) -> None:
        kill_processes(self.bench.holders())

    async def _look(self, failed: Exception | None, done: Sequence[Suspended]) -> None:
        for name, tenant in self.bench.tenants.items():
            if tenant.status == -SIGKILL and name in HELD:
                self.lost.append(name)
        for name in self.lost:
            await self.bench.begin(name)
        await super()._look(failed, done)

    async def _look_at(self, name: str, state: State, failed: Exception | None) -> None:
        if name not in self.lost:
            await super()._look_at(name, state, failed)


def held(faults: Sequence[Fault]) -> list[Fault]:
    """Return the places of these faults, each once, as ones where the helper is killed; a daemon's are the worker's."""
    calls = [one for one in faults if not one.who.startswith("daemon ")]
    places = {(one.operation, one.who, one.call, one.nth): one.of for one in calls}
    return [Fault(*place, of, "hold") for place, of in places.items()]


def operation_named(name: str) -> Operation:
    (found,) = [operation for operation in OPERATIONS if operation.name == name]
    return found


@pytest.mark.parametrize("name", ["suspend several", "resume several"])
def test_holders_that_are_killed_cost_no_program_but_those_that_they_hold(tmp_path: Path, name: str) -> None:
    seed, lost = int(os.environ.get("KYBERNATE_FAULTS_SEED", SEED)), Counter[str]()

    async def main() -> list[str]:
        benches, operation = Benches(tmp_path), operation_named(name)
        bench, wrong = await benches.make(), []
        try:
            await dry_run(bench, operation)
            places = [one for one in held(await dry_run(bench, operation)) if one.who in ("arena", *HELD)]
            for place in random.Random(seed).sample(places, MOST_HOLDERS):
                trial = HolderKilled(bench, operation, place)
                await trial.run()
                lost.update(trial.lost)
                wrong += [f"{place}: {'; '.join(trial.wrong)}. {trial.error}"] if trial.wrong else []
        finally:
            print(bench.log.read_text()[-8000:] if wrong else f"{name}: {dict(lost)} were killed with their holders")
            await benches.discard(bench)
        return wrong

    wrong = asyncio.run(main())
    assert not wrong, "\n".join(wrong)
    assert lost, "no holder was killed that held a program"


@pytest.mark.parametrize("name", THROUGH_ARENA)
def test_helper_that_is_killed_at_a_call_costs_no_program(tmp_path: Path, name: str) -> None:
    picked, seed = os.environ.get("KYBERNATE_FAULT", ""), int(os.environ.get("KYBERNATE_FAULTS_SEED", SEED))

    async def main() -> list[Trial]:
        benches, operation = Benches(tmp_path), operation_named(name)
        bench, trials = await benches.make(), []
        try:
            await dry_run(bench, operation)  # or the first one makes more calls than the others
            places = [one for one in held(await dry_run(bench, operation)) if picked in str(one)]
            if not picked:
                random.Random(seed).shuffle(places)
                del places[MOST:]
            for place in places:
                trials.append(trial := Killed(bench, operation, place))
                await trial.run()
                if trial.wrong:
                    print(trial.fault, bench.log.read_text()[-8000:])
                    await benches.discard(bench)
                    bench = await benches.make()
        finally:
            await benches.discard(bench)
        return trials

    trials = asyncio.run(main())
    reached = [trial for trial in trials if trial.reached]
    print(f"{name}: the helper was killed at {len(reached)} of {len(trials)} calls")
    wrong = [f"{trial.fault}: {'; '.join(trial.wrong)}. {trial.error}" for trial in trials if trial.wrong]
    assert not wrong, "\n".join(wrong)
    assert picked or len(reached) > len(trials) // 2


def test_processes_that_are_killed_at_any_moment_cost_no_program(tmp_path: Path) -> None:
    seed, kills = int(os.environ.get("KYBERNATE_FAULTS_SEED", SEED)), int(os.environ.get("KYBERNATE_KILLS", KILLS))
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    wrong: list[str] = []

    async def once(bench: Bench, operation: Operation, seconds: float) -> None:
        if operation.away:
            await leave(bench, operation.away, LIMITS)
        work = asyncio.ensure_future(operation.act(bench, LIMITS))
        await asyncio.sleep(chance.uniform(0, seconds))
        victim = chance.choice(CHANCES)
        done[f"{victim} in {operation.name}{' that had ended' if work.done() else ''}"] += 1
        await asyncio.to_thread(kill, bench, victim, chance)
        with suppress(CudaError):
            await work
        lost = [name for name, tenant in bench.tenants.items() if not tenant.alive]
        wrong.extend(f"{victim} in {operation.name}: {name} has ended" for name in lost)
        for name in lost:
            await bench.begin(name)
        while bench.pids != await computing(bench):  # a worker that was just killed may have been asked for states
            wrong.extend(f"{victim} in {operation.name}: {one}" for one in await recover(bench))
        for name, tenant in bench.tenants.items():
            if not await asyncio.to_thread(tenant.answers_right):
                wrong.append(f"{victim} in {operation.name}: {name} has not its memory")
            await asyncio.to_thread(tenant.change)

    async def main() -> None:
        benches = Benches(tmp_path)
        bench = await benches.make()
        try:
            operations = {name: operation_named(name) for name in THROUGH_ARENA}
            lasts: dict[str, float] = {}
            for name, operation in operations.items():
                await dry_run(bench, operation)
                await leave(bench, operation.away, LIMITS)
                began = time.monotonic()
                await operation.act(bench, LIMITS)
                lasts[name] = time.monotonic() - began
                assert not await recover(bench)
            for _ in range(kills):
                name = chance.choice(THROUGH_ARENA)
                await once(bench, operations[name], lasts[name])
            done["taken over by the next helper"] = bench.log.read_text().count("arena.taken_over")
        finally:
            await benches.discard(bench)

    asyncio.run(main())
    print(f"seed {seed}: {kills} kills", *(f"{times:4} {what}" for what, times in sorted(done.items())), sep="\n")
    assert not wrong, "\n".join(wrong)


async def computing(bench: Bench) -> list[int]:
    states = (await bench.helper.states(bench.pids, PATIENCE)).processes
    return [pid for pid in bench.pids if pid in states and states[pid].state is State.RUNNING]


def kill(bench: Bench, victim: str, chance: random.Random) -> None:
    """Kill one of them, if there is one."""
    if victim == "helper":
        bench.kill_helper()
    elif victim == "arena's worker":
        found = bench.arenas_worker()
        if found is not None:
            found.kill()
    elif found := bench.workers():
        with suppress(psutil.NoSuchProcess):
            chance.choice(found).kill()

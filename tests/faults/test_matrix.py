"""Each call of the driver, in each operation, fails, hangs, or loses the process that makes it: no container is lost.

Nor where who does the operation is killed at such a call, or where the arena, the image's tmpfs or the GPU is full.

KYBERNATE_FAULT, a part of a fault's name as it is printed, picks faults, all of them where it is "/";
KYBERNATE_FAULTS_SEED makes another choice of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from kybernate_shim.native import PRELOAD
from kybernate_shim.native import build as build_native
from tests.fakes.cuda import build
from tests.faults.bench import Bench
from tests.faults.matrix import Fault, chosen, faults, killed, shortages
from tests.faults.operations import LIMITS, OPERATIONS, Operation, leave, recover
from tests.faults.shortages import mount_images, unmount_images
from tests.faults.trial import Trial, end_worker

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
BENCHES = 8  # most of them wait for a deadline
MOST = 215
LEAST = 200
SEED = 1


@dataclass
class Benches:
    """Makes benches, each in a directory of its own."""

    root: Path
    libraries: Path = field(default_factory=build)
    _numbers: count[int] = field(default_factory=count)

    async def make(self) -> Bench:
        preload = build_native(PRELOAD, self.libraries)
        bench = Bench(self.root / str(next(self._numbers)), self.libraries, preload)
        await bench.start()
        mount_images(bench.images)
        await leave(bench, "a", LIMITS)  # by a worker that has to be started first, and makes more calls than later
        assert not await recover(bench)
        return bench

    async def discard(self, bench: Bench) -> None:
        await bench.stop()
        unmount_images(bench.images)
        shutil.rmtree(bench.root)


async def dry_run(bench: Bench, operation: Operation) -> list[Fault]:
    """Do an operation as it should go, and return what can go wrong."""
    if operation.away:
        await leave(bench, operation.away, LIMITS)
    if operation.cold:
        await end_worker(bench)
    bench.gpus.record()
    await operation.act(bench, LIMITS)
    calls = bench.gpus.recorded()
    assert not await recover(bench)
    for tenant in bench.tenants.values():
        await asyncio.to_thread(tenant.change)
    names = {tenant.pid: name for name, tenant in bench.tenants.items()}
    made = list(faults(operation.name, calls, names, cold=operation.cold))
    return [*made, *killed(operation.name, calls, names), *shortages(operation.name, operation.short_of)]


async def all_faults(benches: Benches) -> list[Fault]:
    bench = await benches.make()
    try:
        return [fault for operation in OPERATIONS for fault in await dry_run(bench, operation)]
    finally:
        await benches.discard(bench)


async def try_all(benches: Benches, wanted: Sequence[Fault]) -> list[Trial]:
    """Try one fault after the other on each of several benches; one where something was wrong is replaced."""
    operations = {operation.name: operation for operation in OPERATIONS}
    queue = iter(sorted(wanted, key=lambda fault: "h" not in fault.what))  # what takes longest first
    trials: list[Trial] = []

    async def work() -> None:
        bench = await benches.make()
        try:
            for fault in queue:
                trial = Trial(bench, operations[fault.operation], fault)
                await trial.run()
                trials.append(trial)
                if trial.wrong:
                    print(f"{trial.fault}: the helper's log:", *bench.log.read_text().splitlines()[-40:], sep="\n")
                    await benches.discard(bench)
                    bench = await benches.make()
        finally:
            await benches.discard(bench)

    await asyncio.gather(*(work() for _ in range(min(BENCHES, len(wanted)))))
    return trials


def test_no_fault_of_a_call_costs_a_program(tmp_path: Path) -> None:
    seed = int(os.environ.get("KYBERNATE_FAULTS_SEED", SEED))
    picked = os.environ.get("KYBERNATE_FAULT", "")
    benches = Benches(tmp_path)
    began = time.monotonic()

    async def main() -> tuple[int, list[Trial]]:
        every = await all_faults(benches)
        if picked:
            return len(every), await try_all(benches, [fault for fault in every if picked in str(fault)])
        return len(every), await try_all(benches, chosen(every, MOST, seed))

    number, trials = asyncio.run(main())
    reached = {trial.fault for trial in trials if trial.reached}
    print(f"seed {seed}: {len(reached)} of {number} faults in {time.monotonic() - began:.0f} s")
    print(*(f"{kind:10} {times}" for kind, times in Counter(fault.what for fault in reached).items()), sep="\n")
    wrong = [f"{trial.fault}: {'; '.join(trial.wrong)}. {trial.error}" for trial in trials if trial.wrong]
    assert not wrong, "\n".join(wrong)
    assert picked or len(reached) >= LEAST

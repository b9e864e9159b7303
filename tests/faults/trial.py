"""One fault in one operation, and what must be true afterwards.

Whatever the fault: an operation ends, by its deadline or before. Each program computes with the memory that it had, or
is suspended as a whole, or is locked and the error says so. Tried again without the fault, the operation succeeds.
Nothing is left over: no room in the arena, no memory of a GPU, no descriptor in a program.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import psutil

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.sequence import StepSeconds, Suspended
from kybernate_shim.vram_io.errors import VramError
from tests.faults import daemon
from tests.faults.bench import ARENA_BYTES, CONTEXT, MIB, PATIENCE, PIECE, PIECES, ROOT, Bench
from tests.faults.matrix import TOLD, VERBS, Fault, sites
from tests.faults.operations import LIMITS, Operation, leave, recover
from tests.faults.shortages import SHORTAGES

SHORT = 0.5  # s for the step that hangs
ENDLESS = 4 * PATIENCE
SCRATCH = 2 * MIB  # what hashing takes of a GPU


class Died(Exception):
    """Who has made the operation was killed, and reports nothing."""


@dataclass
class Trial:
    """A fault's trial on a bench. `reached` once the call was made; `wrong` says what should not be."""

    bench: Bench
    operation: Operation
    fault: Fault
    reached: bool = False
    wrong: list[str] = field(default_factory=list)
    error: str = ""
    _step: str = "preparation"

    async def run(self) -> None:
        try:
            async with asyncio.timeout(ENDLESS):
                await self._prepare()
                self._step = "attempt"
                failed, done = await self._elsewhere() if self.fault.what == "killed" else await self._attempt()
                self._step = "look"
                await self._look(failed, done)
                self._step = "second attempt"
                await self._try_again()
        except Exception as error:  # noqa: BLE001  # also of the bench itself: it is to be named with its fault
            self.wrong.append(f"{self._step}: {type(error).__name__}: {error}")

    async def _prepare(self) -> None:
        if self.operation.away:
            await leave(self.bench, self.operation.away, LIMITS)
        if self.operation.cold:
            await end_worker(self.bench)
        elif self.fault.who == "arena":
            await self.bench.helper.warm(self.bench.pids, PATIENCE)  # its last worker may have died

    async def _attempt(self) -> tuple[Exception | None, Sequence[Suspended]]:
        """Do the operation with the fault; return how it failed, or what it did."""
        gpus, names = self.bench.gpus, {tenant.pid: name for name, tenant in self.bench.tenants.items()}
        full = self.fault.what == "full"
        shortage = SHORTAGES[self.fault.call](self.bench) if full else nullcontext()
        gpus.record()
        gpus.switch("" if full else self._switch())
        try:
            with shortage:
                return None, await self.operation.act(self.bench, self._limits())
        except (CudaError, VramError, OSError) as error:
            self.error = everything_in(error)
            return error, []
        finally:
            gpus.switch("")
            made = list(sites(gpus.recorded(), names)).count((self.fault.who, self.fault.call))
            self.reached = full or made >= self.fault.nth

    async def _elsewhere(self) -> tuple[Died | None, Sequence[Suspended]]:
        """Do the operation in another process, and kill that where the driver is about to be called."""
        bench, fault = self.bench, self.fault
        target = bench.tenants[fault.who[-1]].pid
        calls = bench.gpus.directory / "calls"
        bench.gpus.record()
        bench.gpus.switch(f"{fault.call}:{fault.nth}:hold@{target}")
        programs = [f"{name}={tenant.pid}" for name, tenant in bench.tenants.items()]
        argv = [sys.executable, "-m", daemon.__name__, self.operation.name, str(bench.root), *programs]
        process = subprocess.Popen(argv, cwd=ROOT)  # noqa: ASYNC220  # a moment

        def at_the_call() -> bool:
            return calls.read_text().count(f" {fault.call} {target} ") >= fault.nth

        try:
            while not (reached := at_the_call()) and process.poll() is None:  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.01)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)
            bench.gpus.recorded()
            bench.gpus.switch("")
        self.reached = reached
        return Died() if reached else None, []

    def _switch(self) -> str:
        fault, bench = self.fault, self.bench
        switch = f"{fault.call}:{fault.nth}:{fault.what}"
        if fault.who != "arena":
            return f"{switch}@{bench.tenants[fault.who[-1]].pid}"
        if self.operation.cold:
            return switch  # of what no program calls
        worker = bench.arenas_worker()
        assert worker, "the arena has no worker, and a program would meet the fault"
        return f"{switch}@{worker.pid}"

    def _limits(self) -> StepSeconds:
        """Have the step that hangs given up soon; what else needs as long is given up too, which is a fault as well."""
        if self.fault.what not in ("hang", "hang-after", "hold"):
            return LIMITS
        call = self.fault.call
        if call in ("state", "tid"):
            return replace(LIMITS, lock=SHORT)
        if call in VERBS:
            return replace(LIMITS, **{call: SHORT})
        return replace(LIMITS, lock=SHORT, checkpoint=SHORT, restore=SHORT, unlock=SHORT)

    async def _look(self, failed: Exception | None, done: Sequence[Suspended]) -> None:
        bench, fault = self.bench, self.fault
        if isinstance(failed, Died):
            return  # the next helper has to bring back what it leaves behind
        if fault.what == "full" and fault.call != "arena" and not failed:
            self.wrong.append("there was room")
        if failed and fault.what in TOLD and not re.search(TOLD[fault.what], self.error):
            self.wrong.append("the error does not tell the reason")
        if fault.ends_program and self.reached:
            await bench.begin(fault.ends_program)  # the others must have lost nothing
        states = (await bench.helper.states(bench.pids, PATIENCE)).processes
        for name, tenant in bench.tenants.items():
            if not tenant.alive:
                self.wrong.append(f"{name} has ended with status {tenant.status}")
            elif tenant.pid not in states:
                self.wrong.append(f"{name} does not tell its state")
            else:
                await self._look_at(name, states[tenant.pid].state, failed)
        for one in done:
            self._look_at_suspended(one)

    async def _look_at(self, name: str, state: State, failed: Exception | None) -> None:
        tenant = self.bench.tenants[name]
        if state is State.RUNNING:
            if self.bench.in_arena(name):
                self.wrong.append(f"{name} computes, and the arena has bytes of it")
            elif not await asyncio.to_thread(tenant.answers_right):
                self.wrong.append(f"{name} computes without its memory")
            if not failed and name in self.operation.left and name != self.fault.ends_program:
                self.wrong.append(f"{name} computes, and the operation has suspended it")
        elif not failed:
            if name not in self.operation.left or state is not State.CHECKPOINTED:
                self.wrong.append(f"{name} is {state.name}, and the operation has not failed")
        elif not self._may_stay(name, state):
            self.wrong.append(f"{name} is {state.name}, and the error does not tell")

    def _may_stay(self, name: str, state: State) -> bool:
        """Tell whether a program can be in this state, which is not RUNNING, after a failure."""
        if state is State.CHECKPOINTED and name in self.operation.away + self.operation.between:
            return True
        pid, told = self.bench.tenants[name].pid, state.name.lower()
        return re.search(rf"process {pid} (is|stays) {told}", self.error) is not None

    def _look_at_suspended(self, suspended: Suspended) -> None:
        """Where a fault kept memory out of the arena, a reason is told."""
        for name, tenant in self.bench.tenants.items():
            if tenant.pid in suspended.pids and name != "c" and "without" not in self.operation.name:
                taken = suspended.taken.moved.get(tenant.pid, 0)
                if taken != tenant.bytes and not suspended.taken.reasons.get(tenant.pid):
                    self.wrong.append(f"the arena has {taken} bytes of {name}, and no reason is told")

    async def _try_again(self) -> None:
        """Bring everything back, and do the operation without the fault."""
        bench = self.bench
        self.wrong += await recover(bench)
        await self._require_all_back("recovered")
        if self.operation.away:
            await leave(bench, self.operation.away, LIMITS)
        for one in await self.operation.act(bench, LIMITS):
            without = bench.tenants["c"].pid if "c" in bench.tenants else 0  # it has not the library, which is told
            self.wrong += [f"tried again: {reason}" for pid, reason in one.taken.reasons.items() if pid != without]
        self.wrong += await recover(bench)
        await self._require_all_back("tried again")
        self._require_nothing_left()

    async def _require_all_back(self, when: str) -> None:
        bench = self.bench
        states = (await bench.helper.states(bench.pids, PATIENCE)).processes
        for name, tenant in bench.tenants.items():
            if states[tenant.pid].state is not State.RUNNING:
                self.wrong.append(f"{when}: {name} is {states[tenant.pid].state.name}")
            elif not await asyncio.to_thread(tenant.answers_right):
                self.wrong.append(f"{when}: {name} has not its memory")
            await asyncio.to_thread(tenant.change)
        if (free := bench.memory.free()) != ARENA_BYTES:
            self.wrong.append(f"{when}: {(ARENA_BYTES - free) / MIB} MiB of the arena have no owner that computes")

    def _require_nothing_left(self) -> None:
        bench = self.bench
        programs = sum(CONTEXT + pieces * PIECE for pieces in PIECES.values())
        worker = bench.gpus.used()[0] - programs
        if worker not in (0, CONTEXT, CONTEXT + SCRATCH):
            self.wrong.append(f"{(worker - CONTEXT - SCRATCH) / MIB} MiB of the GPU are left over")
        for name, tenant in bench.tenants.items():
            if (more := tenant.descriptors() - tenant.had) > 0:
                self.wrong.append(f"{more} descriptors are left over in {name}")


def everything_in(error: BaseException) -> str:
    """Return an error's message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


async def end_worker(bench: Bench) -> None:
    """Have the arena's next job done by a worker that is new."""
    if worker := bench.arenas_worker():
        worker.kill()
        await asyncio.to_thread(psutil.wait_procs, [worker], timeout=PATIENCE)

"""The driver's verbs on the pretended GPUs, through the real cuda.bindings, a worker, the helper and its client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.errors import CudaCallFailed, GpuPair
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.gpu.sequence import bring_back
from tests.contract.cuda_driver.helper_processes import PATIENCE, called
from tests.fakes.cuda import GIB, Gpus
from tests.fakes.cuda.programs import Holder, Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
MIB = 1 << 20
CONTEXT = 8 * MIB  # what a context costs on a pretended GPU


async def state_of(helper: CudaHelper, pid: int) -> State:
    return (await helper.states([pid], PATIENCE)).processes[pid].state


async def reach(helper: CudaHelper, pid: int, state: State) -> None:
    """Bring a running process to `state`."""
    if state in (State.LOCKED, State.CHECKPOINTED):
        await helper.lock([pid], PATIENCE)
    if state is State.CHECKPOINTED:
        await helper.checkpoint([pid], PATIENCE)


def test_info_describes_the_gpus_and_their_free_memory(use: Run, start: Start, gpus: Gpus) -> None:
    start(device=1, mib=4)
    info = use(lambda helper: helper.info())
    assert (info.driver_version, info.api_version, info.missing_calls) == ("580.159.04", 13000, ())
    assert [gpu.uuid for gpu in info.gpus] == gpus.uuids
    assert [(gpu.name, gpu.total_bytes, gpu.mig) for gpu in info.gpus] == [("Pretended H200", GIB, False)] * 2
    assert [gpu.free_bytes for gpu in info.gpus] == [GIB, GIB - CONTEXT - 4 * MIB]


def test_states_name_only_processes_that_hold_cuda_state(use: Run, start: Start) -> None:
    program = start()
    states = use(lambda helper: helper.states([1, os.getpid(), program.pid, 2**22 - 1]))
    assert states.unknown == {}
    assert list(states.processes) == [program.pid]
    process = states.processes[program.pid]
    assert process.state is State.RUNNING
    thread = Path(f"/proc/{program.pid}/task/{process.restore_thread}/comm").read_text()
    assert thread.startswith("cuda")


def test_process_without_context_is_found_and_its_forked_child_is_not(use: Run, gpus: Gpus) -> None:
    code = (
        "import ctypes, os, time; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0;"
        "child = os.fork();"
        "child and print(child, flush=True);"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            states = use(lambda helper: helper.states([parent.pid, child]))
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()
    assert list(states.processes) == [parent.pid]


@pytest.mark.parametrize("python", [False, True])
def test_cycle_frees_the_gpu_and_keeps_the_numbers(use: Run, start: Start, gpus: Gpus, python: bool) -> None:
    program = start(mib=4, python=python)
    assert gpus.used() == [CONTEXT + 4 * MIB, 0]

    async def cycle(helper: CudaHelper) -> None:
        await helper.lock([program.pid], PATIENCE)
        program.stands_still()
        assert await state_of(helper, program.pid) is State.LOCKED
        before = anonymous_mappings(program.pid)
        await helper.checkpoint([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is State.CHECKPOINTED
        assert gpus.used() == [0, 0]
        # As with the real driver: one new mapping, of the size of what was on the GPU.
        new = {(begin, end) for begin, end in anonymous_mappings(program.pid) - before if end - begin >= MIB}
        assert [end - begin for begin, end in new] == [CONTEXT + 4 * MIB]
        assert held_by(program.pid) == []
        await helper.restore([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is State.LOCKED
        assert not anonymous_mappings(program.pid) & new
        assert gpus.used() == [CONTEXT + 4 * MIB, 0]
        program.stands_still()
        await helper.unlock([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is State.RUNNING

    for _ in range(3):
        use(cycle)
        program.computes_on()


def anonymous_mappings(pid: int) -> set[tuple[int, int]]:
    """Return begin and end of the private, anonymous, writable mappings that have no name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = (re.fullmatch(r"(\w+)-(\w+) rw-p 00000000 00:00 0 *", line) for line in lines)
    return {(int(match[1], 16), int(match[2], 16)) for match in found if match}


def held_by(pid: int) -> list[str]:
    """Return what a process holds that CRIU would refuse: sockets, and files of the pretended GPUs."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [link for link in links + mapped if "socket:" in link or "/held/" in link]


def test_process_on_the_gpu_holds_what_criu_refuses(start: Start) -> None:
    assert any("socket:" in link for link in held_by(start().pid))


LEGAL = {"lock": State.RUNNING, "checkpoint": State.LOCKED, "restore": State.CHECKPOINTED, "unlock": State.LOCKED}
ILLEGAL = [
    (verb, state)
    for verb, legal in LEGAL.items()
    for state in (State.RUNNING, State.LOCKED, State.CHECKPOINTED)
    if state is not legal
]


@pytest.mark.parametrize(("verb", "state"), ILLEGAL)
def test_illegal_move_is_refused_and_changes_nothing(use: Run, start: Start, verb: str, state: State) -> None:
    program = start()

    async def body(helper: CudaHelper) -> None:
        await reach(helper, program.pid, state)
        with pytest.raises(CudaCallFailed, match=r"CUDA_ERROR_ILLEGAL_STATE.*nothing was changed"):
            await getattr(helper, verb)([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is state

    use(body)


@pytest.mark.parametrize(("pid", "error"), [(1, "NOT_INITIALIZED"), (2**22 - 1, "OPERATING_SYSTEM")])
def test_verb_on_a_process_without_cuda_names_the_reason(use: Run, pid: int, error: str) -> None:
    with pytest.raises(CudaCallFailed, match=f"CUDA lock of process {pid} failed: CUDA_ERROR_{error}"):
        use(lambda helper: helper.lock([pid], 1))


def test_lock_that_does_not_drain_in_time_leaves_the_process_running(use: Run, start: Start) -> None:
    program = start(busy_ms=1500)

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaCallFailed, match=r"CUDA_ERROR_NOT_READY.*keeps running"):
            await helper.lock([program.pid], 0.1)
        assert await state_of(helper, program.pid) is State.RUNNING
        program.wait_for_steps(1)
        await helper.lock([program.pid], PATIENCE)
        await helper.unlock([program.pid], PATIENCE)

    use(body)
    program.wait_for_steps(1)


def test_locks_of_eight_processes_wait_for_each_at_the_same_time(use: Run, start: Start, gpus: Gpus) -> None:
    """Ranks wait for each other on the GPU; locked one by one, in whatever order, they would never drain.

    Here all of them are stopped, and each continues only when the one that was asked after it is locked.
    """
    programs = [start(device=index % 2) for index in range(8)]
    pids = [program.pid for program in programs]
    for program in programs:
        program.signal(signal.SIGSTOP)

    async def body(helper: CudaHelper) -> None:
        gpus.record()
        lock = asyncio.create_task(helper.lock(pids, PATIENCE))
        await called(gpus, "lock", len(programs))
        for program in reversed(programs):
            program.signal(signal.SIGCONT)
            until = time.monotonic() + 10
            while await state_of(helper, program.pid) is not State.LOCKED:
                assert time.monotonic() < until, f"process {program.pid} is not locked while others are stopped"
        await lock
        await helper.unlock(pids, PATIENCE)

    use(body)
    for program in programs:
        program.computes_on()


def test_checkpoints_and_restores_of_eight_processes_run_in_parallel(use: Run, start: Start, gpus: Gpus) -> None:
    programs = [start(device=index % 2) for index in range(8)]
    pids = [program.pid for program in programs]
    gpus.slow(60)  # 10 MiB take 0.6 s

    async def body(helper: CudaHelper) -> None:
        await helper.lock(pids, PATIENCE)
        for verb in (helper.checkpoint, helper.restore):
            began = time.monotonic()
            seconds = await verb(pids, PATIENCE)
            elapsed = time.monotonic() - began
            assert seconds.keys() == set(pids)
            assert elapsed < sum(seconds.values()) / 2, (elapsed, seconds)
        await helper.unlock(pids, PATIENCE)

    use(body)
    for program in programs:
        program.computes_on()


def test_stopped_process_is_given_up_and_answers_again_when_it_goes_on(use: Run, start: Start) -> None:
    stopped, other = start(), start()
    stopped.signal(signal.SIGSTOP)

    async def body(helper: CudaHelper) -> None:
        states = await helper.states([stopped.pid, other.pid], 0.5)
        assert list(states.processes) == [other.pid]
        assert "was not answered" in str(states.unknown[stopped.pid])
        with pytest.raises(
            CudaCallFailed, match=f"CUDA lock of process {stopped.pid} was not answered.*thaw"
        ) as caught:
            await helper.lock([stopped.pid, other.pid], 0.5)
        assert caught.value.done == (other.pid,)
        stopped.signal(signal.SIGCONT)
        assert await bring_back(helper, [stopped.pid, other.pid]) == []

    use(body)
    stopped.computes_on()
    other.computes_on()


def swap(gpus: Gpus) -> list[GpuPair]:
    first, second = gpus.uuids
    return [GpuPair(first, second), GpuPair(second, first)]


def test_gpu_map_moves_a_process_and_later_restores_leave_it_there(use: Run, start: Start, gpus: Gpus) -> None:
    program = start(device=0)

    async def body(helper: CudaHelper) -> None:
        for pairs in (swap(gpus), []):
            await reach(helper, program.pid, State.CHECKPOINTED)
            await helper.restore([program.pid], 5, pairs)
            await helper.unlock([program.pid], PATIENCE)
            assert gpus.used() == [0, CONTEXT + 2 * MIB]
        await reach(helper, program.pid, State.CHECKPOINTED)
        await helper.restore([program.pid], 5, swap(gpus))
        await helper.unlock([program.pid], PATIENCE)
        assert gpus.used() == [CONTEXT + 2 * MIB, 0]

    use(body)
    program.computes_on()


WRONG_MAPS: dict[str, Callable[[str, str], list[GpuPair]]] = {
    "one of two GPUs": lambda a, b: [GpuPair(a, b)],
    "no permutation": lambda a, b: [GpuPair(a, b), GpuPair(b, b)],
    "a GPU twice": lambda a, b: [GpuPair(a, b), GpuPair(a, a)],
    "a GPU too many": lambda a, b: [GpuPair(a, b), GpuPair(b, a), GpuPair(a, a)],
    "an unknown GPU": lambda a, b: [GpuPair(a, b), GpuPair(b, "GPU-" + "12345678-1234-1234-1234-123456789012")],
}


@pytest.mark.parametrize("kind", WRONG_MAPS)
def test_wrong_gpu_map_is_refused_and_a_plain_restore_still_works(
    use: Run, start: Start, gpus: Gpus, kind: str
) -> None:
    program = start()

    async def body(helper: CudaHelper) -> None:
        await reach(helper, program.pid, State.CHECKPOINTED)
        with pytest.raises(CudaCallFailed, match=r"CUDA_ERROR_INVALID_VALUE.*still checkpointed; a GPU map must name"):
            await helper.restore([program.pid], 5, WRONG_MAPS[kind](*gpus.uuids))
        assert await state_of(helper, program.pid) is State.CHECKPOINTED
        await helper.restore([program.pid], PATIENCE)
        await helper.unlock([program.pid], PATIENCE)

    use(body)
    program.computes_on()


def test_restore_without_room_loses_the_process(use: Run, start: Start, gpus: Gpus) -> None:
    """As measured: OUT_OF_MEMORY once, then OPERATING_SYSTEM forever, also when there is room again."""
    program = start(mib=600)

    async def body(helper: CudaHelper) -> None:
        await reach(helper, program.pid, State.CHECKPOINTED)
        other = start(mib=500)
        with pytest.raises(CudaCallFailed, match=r"CUDA_ERROR_OUT_OF_MEMORY.*enough free memory.*end the process"):
            await helper.restore([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is State.CHECKPOINTED
        other.kill()
        with pytest.raises(CudaCallFailed, match=r"CUDA_ERROR_OPERATING_SYSTEM.*earlier restore"):
            await helper.restore([program.pid], PATIENCE)
        assert await state_of(helper, program.pid) is State.CHECKPOINTED
        assert gpus.used() == [0, 0]

    use(body)


def test_imported_memory_loses_the_process(use: Run, gpus: Gpus, libraries: Path) -> None:
    """As measured: the checkpoint succeeds, the restore is NOT_SUPPORTED."""
    holder = Holder(gpus, libraries, 1)
    holder.share()

    async def body(helper: CudaHelper) -> None:
        await reach(helper, holder.pid, State.CHECKPOINTED)
        with pytest.raises(CudaCallFailed, match="CUDA_ERROR_NOT_SUPPORTED"):
            await helper.restore([holder.pid], PATIENCE)
        assert await state_of(helper, holder.pid) is State.CHECKPOINTED

    use(body)
    holder.kill()


def test_memory_of_a_killed_process_is_free_at_once(start: Start, gpus: Gpus) -> None:
    program = start(mib=64)
    assert gpus.used()[0] == CONTEXT + 64 * MIB
    program.kill()
    assert gpus.used() == [0, 0]
    again = start(mib=900)  # the driver's own account agrees, and drops what the dead one left
    assert gpus.used()[0] == CONTEXT + 900 * MIB
    assert len(list((gpus.directory / "held").iterdir())) == 1
    again.computes_on()

"""Programs with the preload library: their memory goes into the arena and comes back, whatever fails on the way."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.address import answers
from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.control import Verb, control_of
from kybernate_shim.arena.extents import Extent, joined
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.config import NO_NODE
from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_client import CudaHelper, State, cuda_helper, log_path, start_helper
from kybernate_shim.gpu.sequence import StepSeconds, resume, suspend
from kybernate_shim.linux.mount.rootfs import unmount_tree
from tests.contract.cuda_driver.cycles import LIMITS, cycle
from tests.contract.cuda_driver.helper_processes import kill_helper
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root
MIB = 1 << 20
SIZE = 64 * MIB
CONTEXT = 8 * MIB
SLOW = 30  # seconds for a GiB
WORKER = 10 * MIB  # what the arena's worker has of a GPU: a context, and room for hashes


@pytest.fixture
def use(use_arena: Run) -> Run:
    """Every helper here has an arena."""
    return use_arena


@pytest.fixture
def program(start: Start, preload: Path) -> Program:
    return start(mib=8, preload=preload)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.01)


async def out(helper: CudaHelper, *programs: Program) -> Any:
    return await suspend(helper, lambda: [program.pid for program in programs], LIMITS, arena=True)


async def back(helper: CudaHelper, *programs: Program) -> Any:
    return await resume(helper, [program.pid for program in programs], limits=LIMITS)


async def state_of(helper: CudaHelper, program: Program) -> State:
    return (await helper.states([program.pid])).processes[program.pid].state


def in_arena(memory: Memory, program: Program) -> int:
    return sum(one.size for one in memory.kept(ArenaOwner.of(program.pid)))


def test_memory_goes_through_the_arena_and_comes_back(use: Run, program: Program, gpus: Gpus, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        for _ in range(20):
            suspended = await out(helper, program)
            assert [step.name for step in suspended.steps] == ["cuda-lock", "arena-take", "cuda-checkpoint"]
            assert in_arena(memory, program) == 8 * MIB
            assert gpus.used()[0] == WORKER
            assert await state_of(helper, program) is State.CHECKPOINTED
            steps = await back(helper, program)
            assert [step.name for step in steps] == ["cuda-restore", "arena-give", "cuda-unlock"]
            assert in_arena(memory, program) == 0
            program.wait_for_steps(1)

    use(body)
    program.computes_on()


def test_memory_in_the_arena_comes_back_on_another_gpu(use: Run, program: Program, gpus: Gpus) -> None:
    first, second = gpus.uuids
    exchange = [GpuPair(first, second), GpuPair(second, first)]

    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await resume(helper, [program.pid], exchange, LIMITS)
        assert gpus.used() == [WORKER, 2 * CONTEXT + 8 * MIB]  # the worker's, which has hashed nothing there
        program.wait_for_steps(1)
        await out(helper, program)
        await back(helper, program)  # where it is now
        assert gpus.used() == [WORKER, WORKER + CONTEXT + 8 * MIB]

    use(body)
    program.computes_on()


def test_program_stands_still_between_take_and_give(use: Run, program: Program) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await asyncio.to_thread(program.stands_still)
        await back(helper, program)

    use(body)
    program.computes_on()


def test_several_programs_on_two_gpus(use: Run, start: Start, preload: Path, memory: Memory) -> None:
    programs = [start(mib=8, device=index % 2, preload=preload) for index in range(3)]
    programs.append(start(mib=4))  # one without the library goes the driver's way

    async def body(helper: CudaHelper) -> None:
        for _ in range(5):
            await out(helper, *programs)
            assert [in_arena(memory, program) for program in programs] == [8 * MIB] * 3 + [0]
            await back(helper, *programs)

    use(body)
    for program in programs:
        program.computes_on()


def test_one_leaves_while_another_comes(use: Run, start: Start, preload: Path, gpus: Gpus) -> None:
    programs = [start(mib=8, preload=preload) for _ in range(2)]

    async def body(helper: CudaHelper) -> None:
        for leaving, coming in (programs, programs[::-1]):
            await out(helper, coming)
            gpus.slow(SLOW)  # so that the driver still has to do with the one when the other's bytes come
            await asyncio.gather(out(helper, leaving), back(helper, coming))
            coming.wait_for_steps(1)
            gpus.slow(0)
            await back(helper, leaving)

    use(body)
    for program in programs:
        program.computes_on()


def test_what_does_not_fit_goes_the_drivers_way_and_says_so(
    use: Run, start: Start, preload: Path, memory: Memory, gpus: Gpus
) -> None:
    large, small = start(mib=SIZE // MIB + 2, preload=preload), start(mib=8, preload=preload)

    async def body(helper: CudaHelper) -> None:
        suspended = await out(helper, large, small)
        assert "do not fit into the arena" in suspended.taken.reasons[large.pid]
        assert in_arena(memory, large) == 0
        assert in_arena(memory, small) == 8 * MIB
        assert await state_of(helper, large) is State.CHECKPOINTED
        await back(helper, large, small)

    use(body)
    large.computes_on()
    small.computes_on()


def test_room_of_a_process_that_ends_while_it_is_away_is_free_again(use: Run, program: Program, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        assert memory.free() == SIZE - 8 * MIB
        owner = ArenaOwner.of(program.pid)
        program.signal(signal.SIGKILL)
        await until(lambda: not owner.alive)
        assert memory.free() == SIZE

    use(body)


def test_unlock_gives_back_what_is_away(use: Run, program: Program, memory: Memory) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await helper.restore([program.pid], 10)
        await helper.unlock([program.pid], 10)
        assert in_arena(memory, program) == 0

    use(body)
    program.computes_on()


@pytest.mark.parametrize("verb", ["lock", "unlock", "checkpoint"])
@pytest.mark.parametrize("nth", [1, 2])
def test_verb_that_fails_around_the_move_leaves_the_program_computing(
    use: Run, program: Program, gpus: Gpus, memory: Memory, verb: str, nth: int
) -> None:
    gpus.switch(f"{verb}:{nth}:999@{program.pid}")

    async def body(helper: CudaHelper) -> None:
        await cycle(helper, program.pid)
        assert in_arena(memory, program) == 0

    use(body)
    program.computes_on()


@pytest.mark.parametrize("nth", range(1, 15))
def test_call_of_the_arenas_driver_that_fails_costs_nothing(
    use: Run, start: Start, preload: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The n-th virtual memory call of the worker, or of the program, fails once, wherever in a cycle that is."""
    program = start(mib=8, preload=preload, switches=f"vmm:{nth + 5}:2")  # its first ones made its memory
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:1")

    async def body(helper: CudaHelper) -> None:
        for _ in range(2):
            await cycle(helper, program.pid)

    use(body)
    program.computes_on()


@pytest.mark.parametrize("how", ["crash", "hang"])
@pytest.mark.parametrize("nth", [3, 8, 14, 20])
def test_worker_that_dies_in_a_move_is_replaced(
    use: Run, program: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, socket: Path, how: str, nth: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:{how}")
    hasty = StepSeconds(lock=5, checkpoint=2, restore=2, unlock=10, settle=10)

    async def body(helper: CudaHelper) -> None:
        await cycle(helper, program.pid, hasty)

    use(body)
    program.computes_on()


def test_bytes_outlive_the_helper(use: Run, program: Program, socket: Path, memory: Memory) -> None:
    async def away(helper: CudaHelper) -> None:
        await out(helper, program)

    use(away)
    kill_helper(socket)
    assert in_arena(memory, program) == 8 * MIB

    async def return_(helper: CudaHelper) -> None:
        await back(helper, program)

    use(return_)
    program.computes_on()


def test_library_answers_from_the_start(program: Program) -> None:
    control = control_of(program.pid)
    assert control is not None
    with control:
        assert sum(block.size for block in control.blocks()) == 8 * MIB
        control.ask(Verb.PROBE, seconds=5)
    program.computes_on()


def test_arena_grows_with_its_setting_and_never_shrinks(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    try:
        Memory(4 * MIB, folder).prepare()
        Memory(64 * MIB, folder).prepare()
        assert Memory(4 * MIB, folder).size == 64 * MIB
        Memory(4 * MIB, folder).prepare()
        Memory(128 * MIB, folder).prepare(grow=False)
        memory = Memory(64 * MIB, folder)
        assert memory.free() == 64 * MIB
        memory.file.write_bytes(bytes(64 * MIB))  # the filesystem has the room, too
    finally:
        unmount_tree(folder)


def test_parts_of_the_arena_lie_on_their_nodes(tmp_path: Path) -> None:
    """Of which this machine has one, at least; a process that maps the file finds the policy there."""
    folder = tmp_path / "arena"
    try:
        Memory(((NO_NODE, 4 * MIB),), folder).prepare()
        Memory(((NO_NODE, 4 * MIB), (0, 8 * MIB)), folder).prepare()
        memory = Memory(0, folder)
        assert memory.banks == [Bank(NO_NODE, Extent(0, 4 * MIB)), Bank(0, Extent(4 * MIB, 8 * MIB))]
        assert [policy_of(memory.file, 4 * MIB * part) for part in range(3)] == ["default", "prefer:0", "prefer:0"]
    finally:
        unmount_tree(folder)


def policy_of(file: Path, offset: int) -> str:
    """Return where the kernel says that the page of a file at `offset` comes from."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), mmap.PAGESIZE, offset=offset):
        maps = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
        (found,) = [words[1] for words in maps if f"file={file}" in words]
    return found


def test_arena_that_the_machine_cannot_have_leaves_the_driver_its_way(
    gpus: Gpus, program: Program, socket: Path, tmp_path: Path
) -> None:
    start_helper(socket, options=["--arena", f"0:{SIZE},999:{SIZE}", "--arena-folder", str(tmp_path / "none")])

    async def body() -> None:
        await until(lambda: answers(socket))
        async with cuda_helper(socket, start=False) as helper:
            suspended = await out(helper, program)
            assert "gpu.arena names NUMA node 999, and this machine has 0" in suspended.taken.reasons[program.pid]
            assert await state_of(helper, program) is State.CHECKPOINTED
            await back(helper, program)

    asyncio.run(body())
    program.computes_on()


def test_bytes_come_back_whatever_the_configuration_says_by_then(
    use: Run, program: Program, start: Start, preload: Path, socket: Path, memory: Memory
) -> None:
    """Of one that cannot be, with which the arena stays as it is, or of another size, which is used from then on."""
    large = start(mib=SIZE // MIB + 2, preload=preload)

    async def away(helper: CudaHelper) -> None:
        await out(helper, program)

    async def return_() -> list[int]:
        async with cuda_helper(socket, start=False) as helper:
            await back(helper, program)
            return [(await out(helper, one)).taken.bytes // MIB for one in (program, large)]

    def configured(sizes: str) -> list[int]:
        kill_helper(socket)
        start_helper(socket, options=["--arena", sizes, "--arena-folder", str(memory.file.parent)])
        asyncio.run(until(lambda: answers(socket)))
        return asyncio.run(return_())

    use(away)
    assert configured(f"999:{2 * SIZE}") == [8, 0]
    assert memory.size == SIZE

    async def both_back() -> None:
        async with cuda_helper(socket, start=False) as helper:
            await back(helper, large)

    asyncio.run(both_back())
    assert configured(f"0:{2 * SIZE}") == [8, SIZE // MIB + 2]
    assert memory.banks == [Bank(0, Extent(0, 2 * SIZE))]
    asyncio.run(both_back())
    large.computes_on()


def test_room_near_the_programs_gpu_is_used(
    use: Run,
    start: Start,
    preload: Path,
    memory: Memory,
    machine_code: Path,
    socket: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that pretends to have two nodes, with a GPU near each."""
    banks.write(memory.file.with_name("banks"), [Bank(0, Extent(0, 32 * MIB)), Bank(1, Extent(32 * MIB, 32 * MIB))])
    for gpu in range(2):
        (tmp_path / "pci" / f"00fa:0{gpu + 1}:00.0").mkdir(parents=True)
        (tmp_path / "pci" / f"00fa:0{gpu + 1}:00.0" / "numa_node").write_text(f"{1 - gpu}\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import pathlib\nfrom kybernate_shim.linux import numa\n"
        f"numa.DEVICES = pathlib.Path({str(tmp_path / 'pci')!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{Path.cwd()}")
    sizes = f"0:{SIZE // 2},1:{SIZE // 2}"
    start_helper(socket, options=["--arena", sizes, "--arena-folder", str(memory.file.parent)])
    first, second, large = (start(mib=mib, device=device, preload=preload) for mib, device in ((8, 0), (8, 1), (40, 1)))

    async def body(helper: CudaHelper) -> None:
        await out(helper, first, second)
        places = [extents_of(memory, program) for program in (first, second)]
        assert places == [[Extent(32 * MIB, 8 * MIB)], [Extent(0, 8 * MIB)]]
        await out(helper, large)
        assert extents_of(memory, large) == [Extent(8 * MIB, 24 * MIB), Extent(40 * MIB, 16 * MIB)]
        await back(helper, first, second, large)

    asyncio.run(until(lambda: answers(socket)))
    use(body)
    for program in (first, second, large):
        program.computes_on()


def extents_of(memory: Memory, program: Program) -> list[Extent]:
    return list(joined(extent for one in memory.kept(ArenaOwner.of(program.pid)) for extent in one.extents))


def test_worker_gets_ready_for_what_somebody_has_claimed(use: Run, gpus: Gpus, memory: Memory, socket: Path) -> None:
    """On the GPU where it will be wanted, with the memory for it."""

    async def body(helper: CudaHelper) -> None:
        memory.claim(ArenaOwner.of(os.getpid()), [(0, 0x1000, 8 * MIB)])
        await helper.expect(os.getpid(), gpus.uuids[1:], 10)
        assert gpus.used() == [0, WORKER]
        assert memory.file.stat().st_blocks * 512 == SIZE  # what is pinned together is more than that
        memory.give_up(ArenaOwner.of(os.getpid()))
        await helper.expect(os.getpid(), gpus.uuids[1:], 10)
        await helper.expect(2**22 + 1, gpus.uuids, 10)  # no process

    use(body)
    assert '"event": "arena.expected"' in log_path(socket).read_text()


def test_log_tells_moves(use: Run, program: Program, socket: Path) -> None:
    async def body(helper: CudaHelper) -> None:
        await out(helper, program)
        await back(helper, program)

    use(body)
    log = log_path(socket).read_text()
    assert '"event": "arena.taken"' in log
    assert '"event": "arena.settled"' in log

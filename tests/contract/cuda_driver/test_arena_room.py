"""The arena's memory: its size, its NUMA nodes, and who gets what of it."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

import pytest

from kybernate_shim.address import answers
from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.arena.extents import Extent, joined
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper, log_path, start_helper
from kybernate_shim.linux.mount.rootfs import unmount_tree
from kybernate_shim.sizes import NO_NODE
from tests.contract.cuda_driver.arena_moves import (  # noqa: F401  # fixtures
    MIB,
    SIZE,
    WORKER,
    Run,
    Start,
    back,
    out,
    program,
    state_of,
    until,
    use,
)
from tests.contract.cuda_driver.helper_processes import kill_helper
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root


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
    for one in (first, second, large):
        one.computes_on()


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

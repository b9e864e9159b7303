"""The arena follows the node's file while the helper runs, and while processes are suspended in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.address import answers
from kybernate_shim.arena.memory import Memory
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper, log_path, start_helper
from kybernate_shim.gpu.sequence import resume, suspend
from kybernate_shim.linux.mount.rootfs import unmount_tree
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import kill_helpers
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

pytestmark = pytest.mark.root
MIB = 1 << 20
SIZE = 64 * MIB
Start = Callable[..., Program]


@dataclass
class Node:
    """A node whose helper reads `file`, and what is asked of it."""

    file: Path
    folder: Path
    socket: Path

    def set(self, gpu: str) -> None:
        """Replace the file, as a careful editor does."""
        new = self.file.with_suffix(".new")
        new.write_text(f"[gpu]\n{gpu}\n")
        new.rename(self.file)

    def memory(self, size: int) -> Memory:
        return Memory(size, self.folder)

    def out(self, *programs: Program) -> Any:
        async def body(helper: CudaHelper) -> Any:
            return (await suspend(helper, lambda: [one.pid for one in programs], LIMITS, arena=True)).taken

        return self.ask(body)

    def back(self, *programs: Program) -> None:
        async def body(helper: CudaHelper) -> None:
            await resume(helper, [one.pid for one in programs], limits=LIMITS)

        self.ask(body)
        for one in programs:
            one.wait_for_steps(1)

    def look(self) -> None:
        """Make a call: the file is looked at on use."""
        self.ask(lambda helper: helper.states([1]))

    def ask(self, body: Callable[[CudaHelper], Any]) -> Any:
        async def main() -> Any:
            async with cuda_helper(self.socket, start=False) as helper:
                return await body(helper)

        return asyncio.run(main())

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = log_path(self.socket).read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]


@pytest.fixture
def node(gpus: Gpus, socket: Path, tmp_path: Path) -> Iterator[Node]:
    file, folder = tmp_path / "shim.toml", tmp_path / "arena"
    start_helper(socket, options=["--config", str(file), "--arena-folder", str(folder)])
    asyncio.run(listens(socket))
    yield Node(file, folder, socket)
    kill_helpers(socket)
    if folder.is_mount():
        unmount_tree(folder)


async def listens(socket: Path) -> None:
    async with asyncio.timeout(20):
        while not answers(socket):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.01)


@pytest.fixture
def program(start: Start, preload: Path) -> Program:
    return start(mib=8, preload=preload)


def test_arena_that_is_switched_on_is_used_by_the_next_suspend(node: Node, program: Program) -> None:
    taken = node.out(program)
    assert taken.bytes == 0
    assert "gpu.arena is not set" in taken.reasons[program.pid]
    node.set('arena = "64MiB"')  # while it is suspended the driver's way
    node.back(program)
    assert node.out(program).moved == {program.pid: 8 * MIB}
    node.back(program)
    program.computes_on()


def test_arena_that_is_switched_off_gives_back_what_it_has_and_then_its_memory(node: Node, program: Program) -> None:
    node.set('arena = "64MiB"')
    assert node.out(program).bytes == 8 * MIB
    node.set("")
    node.look()
    assert node.memory(SIZE).size == SIZE  # which a suspended process needs
    node.back(program)
    taken = node.out(program)
    assert taken.bytes == 0
    assert "gpu.arena is not set" in taken.reasons[program.pid]
    node.look()
    assert node.memory(SIZE).size == 0
    node.back(program)
    program.computes_on()


def test_larger_arena_is_used_by_the_next_suspend(node: Node, start: Start, preload: Path) -> None:
    small, large = start(mib=8, preload=preload), start(mib=80, preload=preload)
    node.set('arena = "64MiB"')
    taken = node.out(small, large)
    assert taken.moved[small.pid] == 8 * MIB
    assert "do not fit into the arena" in taken.reasons[large.pid]
    node.back(large)
    node.set('arena = "128MiB"')  # while the small one is in it
    assert node.out(large).moved == {large.pid: 80 * MIB}
    node.back(small, large)
    small.computes_on()
    large.computes_on()


def test_smaller_arena_waits_for_whoever_is_in_it_and_gives_out_no_more(
    node: Node, start: Start, preload: Path
) -> None:
    first, second = start(mib=8, preload=preload), start(mib=16, preload=preload)
    node.set('arena = "64MiB"')
    assert node.out(first).bytes == 8 * MIB
    node.set('arena = "16MiB"')
    taken = node.out(second)
    assert taken.bytes == 0
    assert "8 MiB of it are free" in taken.reasons[second.pid]
    assert node.memory(16 * MIB).size == SIZE
    assert node.memory(16 * MIB).surplus == 48 * MIB
    node.back(first, second)
    assert node.out(first).bytes == 8 * MIB
    assert node.memory(16 * MIB).size == 16 * MIB
    node.back(first)
    first.computes_on()
    second.computes_on()


def test_arena_is_divided_by_numa_node_once_it_is_vacant(node: Node, program: Program) -> None:
    node.set('arena = "64MiB"')
    assert node.out(program).bytes == 8 * MIB
    node.set('arena = { 0 = "64MiB" }')
    node.look()
    assert [bank.node for bank in node.memory(0).banks] == [-1]
    node.back(program)
    assert node.out(program).bytes == 8 * MIB
    assert [(bank.node, bank.extent.size) for bank in node.memory(0).banks] == [(0, SIZE)]
    node.back(program)
    program.computes_on()


def test_share_is_that_of_the_file(node: Node, start: Start, preload: Path) -> None:
    first, second = start(mib=8, preload=preload), start(mib=32, preload=preload)
    node.set('arena = "64MiB"')
    assert node.out(first).bytes == 8 * MIB
    node.set('arena = "64MiB"\narena_share = 0.25')
    assert "gpu.arena_share" in node.out(second).reasons[second.pid]
    node.back(second)
    node.set('arena = "64MiB"\narena_share = 1.0')
    assert node.out(second).bytes == 32 * MIB
    node.back(first, second)
    first.computes_on()
    second.computes_on()


def test_broken_file_changes_nothing_and_is_told_once(node: Node, program: Program) -> None:
    node.set('arena = "64MiB"')
    assert node.out(program).bytes == 8 * MIB
    node.file.write_text("[gpu]\narena = [\n")
    node.back(program)
    assert node.out(program).bytes == 8 * MIB
    assert len(node.logged("config.rejected")) == 1
    node.back(program)
    node.set('arena = "64MiB"')
    node.look()
    assert len(node.logged("config.accepted")) == 1


def test_helper_ends_after_the_idle_time_of_the_file(node: Node) -> None:
    node.set("helper_idle = 0.2")
    node.look()
    asyncio.run(ended(node))


async def ended(node: Node) -> None:
    async with asyncio.timeout(30):
        while not node.logged("cuda.helper_ended"):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.05)

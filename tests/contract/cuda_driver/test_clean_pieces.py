"""What a process leaves in the arena is copied once: afterwards only what has changed, and never what is zeros."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.arena.pieces import PIECE
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import Suspended, resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS, cycle
from tests.contract.cuda_driver.helper_processes import helpers, kill_helper, kill_workers
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Holder

Run = Callable[[Callable[[CudaHelper], Any]], Any]
Hold = Callable[..., Holder]

pytestmark = pytest.mark.root
SIZE = 64 << 20
PIECES = 8


@pytest.fixture
def hold(start_holder: Hold) -> Hold:
    """Start a Holder of PIECES, or of so many pieces."""

    def begin(pieces: int = PIECES, **options: Any) -> Holder:
        return start_holder(pieces, **options)

    return begin


async def out(helper: CudaHelper, *holders: Holder) -> Suspended:
    return await suspend(helper, lambda: [holder.pid for holder in holders], LIMITS, arena=True)


async def back(helper: CudaHelper, *holders: Holder) -> None:
    await resume(helper, [holder.pid for holder in holders], limits=LIMITS)
    assert all(holder.is_right() for holder in holders)


async def copied(helper: CudaHelper, holder: Holder) -> int:
    """Suspend and resume, and return how many pieces the suspend had to copy."""
    taken = (await out(helper, holder)).taken
    await back(helper, holder)
    assert (taken.bytes, taken.reasons) == (PIECES * PIECE, {})
    return (taken.bytes - taken.spared) // PIECE


def events(socket: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, log_path(socket).read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def test_only_what_has_changed_is_copied(use_arena: Run, hold: Hold, memory: Memory, socket: Path) -> None:
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        assert await copied(helper, holder) == PIECES
        assert await copied(helper, holder) == 0
        holder.fill(3, 99)
        assert await copied(helper, holder) == 1
        holder.fill(0, 4)  # what another piece has had
        holder.fill(7, 5)
        assert await copied(helper, holder) == 2
        assert await copied(helper, holder) == 0

    use_arena(body)
    assert memory.free() == SIZE
    told = [(event["clean_bytes"], event["zero_bytes"]) for event in events(socket, "arena.offloaded")]
    assert told == [(clean * PIECE, 0) for clean in (0, 8, 7, 6, 8)]


def test_zeros_take_no_part_of_the_arena(use_arena: Run, hold: Hold, memory: Memory) -> None:
    """Twice as much as there is room for."""
    holder = hold(2 * SIZE // PIECE, zeros=True)
    holder.fill(5, 1)

    async def body(helper: CudaHelper) -> None:
        taken = (await out(helper, holder)).taken
        assert (taken.bytes, taken.bytes - taken.spared) == (2 * SIZE, PIECE)
        assert memory.free() == SIZE - PIECE
        await back(helper, holder)
        holder.fill(5, 0)
        holder.fill(6, 2)
        taken = (await out(helper, holder)).taken
        assert taken.bytes - taken.spared == PIECE
        assert memory.free() == SIZE - PIECE
        await back(helper, holder)

    use_arena(body)


def test_zeros_are_put_where_something_else_was(use_arena: Run, hold: Hold, gpus: Gpus) -> None:
    """New memory of a GPU may hold anything."""
    first, second = hold(zeros=True), hold()

    async def body(helper: CudaHelper) -> None:
        for _ in range(3):
            await out(helper, first, second)
            await back(helper, first, second)

    use_arena(body)


def test_copies_give_way_to_what_has_no_other_place(use_arena: Run, hold: Hold, memory: Memory) -> None:
    first, second = hold(), hold(SIZE // PIECE)

    async def body(helper: CudaHelper) -> None:
        await copied(helper, first)
        assert memory.copies(ArenaOwner.of(first.pid)).kept != []
        taken = (await out(helper, second)).taken
        assert taken.bytes == SIZE
        assert memory.copies(ArenaOwner.of(first.pid)).kept == []
        await back(helper, second)
        assert await copied(helper, first) == PIECES
        assert memory.copies(ArenaOwner.of(second.pid)).kept == []

    use_arena(body)


def test_what_fits_only_without_the_zeros_fits(use_arena: Run, hold: Hold, memory: Memory) -> None:
    first, second = hold(), hold(SIZE // PIECE)
    for piece in range(PIECES):
        second.fill(piece, 0)

    async def body(helper: CudaHelper) -> None:
        taken = (await out(helper, first, second)).taken
        assert taken.reasons == {}
        assert memory.free() == 0
        await back(helper, first, second)

    use_arena(body)


def test_copies_outlive_the_worker(use_arena: Run, hold: Hold, socket: Path) -> None:
    """It ends by itself when it has not been needed for a while."""
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        await copied(helper, holder)
        kill_workers(socket)
        holder.fill(2, 77)
        assert await copied(helper, holder) == 1

    use_arena(body)


@pytest.mark.parametrize("nth", [1, 2, 3, 6, 9, 12, 15, 18, 21])
def test_worker_that_dies_in_a_suspend_leaves_no_copy_that_is_wrong(
    use_arena: Run, hold: Hold, monkeypatch: pytest.MonkeyPatch, socket: Path, nth: int
) -> None:
    """Killed at any call, in a suspend that overwrites some of the copies."""
    holder = hold()

    async def first(helper: CudaHelper) -> None:
        await copied(helper, holder)

    use_arena(first)
    kill_helper(socket)
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"vmm:{nth}:crash,launch:{nth}:crash")

    async def second(helper: CudaHelper) -> None:
        holder.fill(1, 50)
        holder.fill(6, 0)
        await cycle(helper, holder.pid)
        assert holder.is_right()

    use_arena(second)
    kill_helper(socket)
    monkeypatch.delenv("FAKE_CUDA_FAIL")

    async def third(helper: CudaHelper) -> None:
        holder.fill(1, 2)
        await copied(helper, holder)
        assert await copied(helper, holder) == 0

    use_arena(third)


def test_memory_that_was_allocated_again_is_known_by_its_bytes(use_arena: Run, hold: Hold) -> None:
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        await copied(helper, holder)
        holder.renew()
        await copied(helper, holder)
        holder.fill(0, 8)
        assert await copied(helper, holder) == 1

    use_arena(body)


def test_equal_bytes_of_two_processes_are_kept_apart(use_arena: Run, hold: Hold, memory: Memory) -> None:
    first, second = hold(), hold()

    async def body(helper: CudaHelper) -> None:
        await copied(helper, first)
        assert await copied(helper, second) == PIECES
        ours, theirs = (memory.copies(ArenaOwner.of(holder.pid)) for holder in (first, second))
        assert ours.key != theirs.key
        marks = {one.marks[at : at + 16] for note in (ours, theirs) for one in note.kept for at in range(0, 128, 16)}
        assert len(marks) == 2 * PIECES
        assert not set(ours.extents) & set(theirs.extents)

    use_arena(body)


def blind(machine_code: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be nothing that compiles."""
    machine_code.unlink()
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['cuda.bindings.nvrtc'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path.cwd()}")


def test_without_a_compiler_all_is_copied_and_said_once(
    use_arena: Run, hold: Hold, machine_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: Path
) -> None:
    blind(machine_code, tmp_path / "site", monkeypatch)
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        for _ in range(3):
            assert await copied(helper, holder) == PIECES

    use_arena(body)
    (said,) = events(socket, "arena.not_hashed")
    assert "NVRTC cannot be loaded" in said["error"]
    assert "install kybernate[gpu]" in said["error"]


@pytest.mark.parametrize("nth", [1, 2])
def test_launch_that_is_refused_costs_a_copy(
    use_arena: Run, hold: Hold, monkeypatch: pytest.MonkeyPatch, socket: Path, nth: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"launch:{nth}:1")
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        assert await copied(helper, holder) == PIECES
        assert await copied(helper, holder) == 0  # the hashes were made by the reload

    use_arena(body)
    assert len(events(socket, "arena.not_hashed")) == 1


def forget_hashes(memory: Memory, holder: Holder) -> None:
    """Let the arena know of a process what it knows of one that was restored."""
    owner = ArenaOwner.of(holder.pid)
    memory.share(owner, [owner])


def test_hashes_that_are_missing_are_made_on_the_way_back(use_arena: Run, hold: Hold, memory: Memory) -> None:
    holder = hold()
    holder.fill(5, 0)

    async def body(helper: CudaHelper) -> None:
        await out(helper, holder)
        forget_hashes(memory, holder)
        await back(helper, holder)
        assert await copied(helper, holder) == 0
        holder.fill(3, 99)
        assert await copied(helper, holder) == 1

    use_arena(body)
    assert memory.free() == SIZE


def test_hashes_that_are_known_are_not_made_again(use_arena: Run, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is two launches: the third of all is the second suspend's."""
    monkeypatch.setenv("FAKE_CUDA_FAIL", "launch:3:1")
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        assert await copied(helper, holder) == PIECES
        assert await copied(helper, holder) == PIECES

    use_arena(body)


@pytest.mark.parametrize("how", ["1", "crash"])
@pytest.mark.parametrize("nth", [3, 4])
def test_hashes_that_cannot_be_made_keep_nothing_from_coming_back(
    use_arena: Run, hold: Hold, memory: Memory, monkeypatch: pytest.MonkeyPatch, nth: int, how: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"launch:{nth}:{how}")
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        await out(helper, holder)
        forget_hashes(memory, holder)
        await back(helper, holder)
        assert memory.copies(ArenaOwner.of(holder.pid)).kept == []
        assert await copied(helper, holder) == PIECES

    use_arena(body)


def test_nothing_is_compiled_while_a_process_waits_for_its_memory(
    use_arena: Run, hold: Hold, memory: Memory, machine_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = hold()

    async def leave(helper: CudaHelper) -> None:
        await out(helper, holder)
        forget_hashes(memory, holder)

    async def return_(helper: CudaHelper) -> None:
        await back(helper, holder)
        assert memory.copies(ArenaOwner.of(holder.pid)).kept == []

    use_arena(leave)
    (socket,) = tmp_path.glob("run/cuda.sock")
    kill_helper(socket)
    blind(machine_code, tmp_path / "site", monkeypatch)
    use_arena(return_)
    assert events(socket, "arena.not_hashed") == []


def test_cycles_leak_nothing(use_arena: Run, hold: Hold, memory: Memory, gpus: Gpus, socket: Path) -> None:
    """200 of them, with changes, zeros, new memory, and a neighbour that needs all of the arena now and then."""
    holder, neighbour = hold(3), hold(SIZE // PIECE)

    def held() -> list[tuple[int, int]]:
        (helper,) = helpers(socket)
        pids = [process.pid for process in (helper, *helper.children(recursive=True))]
        places = [Path(f"/proc/{pid}") for pid in (*pids, holder.pid, neighbour.pid)]
        return [(len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))) for place in places]

    async def body(helper: CudaHelper) -> None:
        before: tuple[object, ...] | None = None
        for number in range(200):
            holder.fill(number % 3, number % 7)
            if number % 50 == 10:
                holder.renew()
            if number % 50 == 20:
                await out(helper, neighbour)
                await back(helper, neighbour)
            await out(helper, holder)
            await back(helper, holder)
            if number in (49, 199):
                now = (held(), gpus.used(), memory.free(), len(list(memory.file.parent.iterdir())))
                before = before or now
        assert now == before

    use_arena(body)

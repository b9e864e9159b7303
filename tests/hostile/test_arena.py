"""Tenants that attack each other through the node's arena: by dying at the wrong moment, by lies, and by stalling."""

# ruff: noqa: F811  # fixtures of another directory are imported, and named again by the tests
from __future__ import annotations

import asyncio
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from kybernate_shim import native
from kybernate_shim.arena import control
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import StepSeconds, resume, suspend
from kybernate_shim.native import PRELOAD
from kybernate_shim.vram_io.errors import NotInArena, VramError
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover import arena_files
from tests.contract.cuda_driver.conftest import (  # noqa: F401  # fixtures
    arena_bytes,
    gpus,
    libraries,
    machine_code,
    memory,
    preload,
    socket,
    start,
    start_holder,
    use_arena,
)
from tests.contract.cuda_driver.cycles import LIMITS
from tests.contract.cuda_driver.helper_processes import helpers, kill_helper
from tests.fakes.cuda.programs import Holder, Program

Run = Callable[[Callable[[CudaHelper], Any]], Any]
Hold = Callable[..., Holder]

pytestmark = pytest.mark.root
PIECES, PIECE = 10, 2 << 20
VICTIMS, ATTACKERS = range(1, PIECES + 1), range(101, 101 + PIECES)  # what their pieces are filled with
FAULT = """
import sys

def once(function, nth, after):
    import functools, os, signal
    calls = 0

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            die()
        result = function(*arguments, **options)
        if calls == nth:
            die()
        return result

    def die():
        try:
            os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    return wrapped

if "kybernate_shim.cuda_worker.worker" in sys.orig_argv and "arena" in sys.orig_argv:
    from kybernate_shim.{module} import {kind}
    {kind}.{name} = once({kind}.{name}, {nth}, {after})
"""


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Let the arena's worker die, once, before or after the n-th call of a method."""

    def inject(method: str, nth: int, *, after: bool = False) -> Path:
        module, kind, name = method.rsplit(".", 2)
        marker = tmp_path / "died"
        (tmp_path / "site").mkdir()
        words = {"marker": str(marker), "module": module, "kind": kind, "name": name, "nth": nth, "after": after}
        text = FAULT
        for key, value in words.items():
            text = text.replace(f"{{{key}}}", str(value)).replace(f"{{{key}!r}}", repr(value))
        (tmp_path / "site" / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{Path.cwd()}")
        return marker

    return inject


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Build a preload library as a tenant would change it: his own answers to the helper."""

    def build(old: str, new: str, file: str = "answer.c") -> Path:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        package = place / "package"
        shutil.copytree(PRELOAD.of().parent, package / PRELOAD.folder)
        source = package / PRELOAD.folder / file
        text = source.read_text()
        assert old in text
        source.write_text(text.replace(old, new))
        with monkeypatch.context() as patched:
            patched.setattr(native, "PACKAGE", package)
            return native.build(PRELOAD, place / "hostile")

    return build


@pytest.fixture
def secrets(use_arena: Run, start_holder: Hold, memory: Memory, socket: Path) -> None:
    """Let another tenant leave its bytes in the arena, and end."""
    victim = start_holder(PIECES)
    owner = ArenaOwner.of(victim.pid)

    async def leave(helper: CudaHelper) -> None:
        await out(helper, victim)

    use_arena(leave)
    assert memory.free() < memory.size
    kill_helper(socket)
    victim.kill()
    assert not owner.alive
    assert memory.free() == memory.size
    assert held_values(memory) >= set(VICTIMS)


def held_values(memory: Memory) -> set[int]:
    """The values of the pieces that lie in the arena, of every owner."""
    content = memory.file.read_bytes()
    return {content[at] for at in range(0, len(content), PIECE)}


def attackers(start_holder: Hold, **options: Any) -> Holder:
    holder = start_holder(PIECES, zeros=True, allocations=PIECES, **options)
    for piece, value in enumerate(ATTACKERS):
        holder.fill(piece, value)
    return holder


def saved_values(memory: Memory, holder: Holder, folder: Path) -> set[int]:
    """The values of the pieces that an image would have of what the arena has of a process."""
    arena_files.save(memory, memory.kept(ArenaOwner.of(holder.pid)), folder / "image", CopyOptions(threads=1), pid=1)
    content = (folder / "image").read_bytes()
    return {content[at] for at in range(0, len(content), PIECE)}


def arena_workers(socket: Path) -> list[int]:
    (helper,) = helpers(socket)
    return [child.pid for child in helper.children() if "arena" in child.cmdline()]


async def out(helper: CudaHelper, holder: Holder | Program, limits: StepSeconds = LIMITS) -> Any:
    return await suspend(helper, lambda: [holder.pid], limits, arena=True)


HONEST = "stay(control, SHARED)"
LIE = f"(control->blocks[8].state != HERE ? leave(control, SHARED, 0, control->used) : {HONEST})"  # FORGET gives all up


def test_memory_that_was_never_copied_is_not_replaced_by_anothers(
    use_arena: Run,
    secrets: None,
    start_holder: Hold,
    hostile: Callable[[str, str], Path],
    fault: Callable[..., Path],
    memory: Memory,
    tmp_path: Path,
) -> None:
    """The library gives memory up that is shared for the copy, and the worker dies before that is made."""
    attacker = attackers(start_holder, library=hostile(HONEST, LIE))
    marker = fault("arena.memory.Memory.update", 1, after=True)

    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaError, match="not in the arena: they were never copied, and the process has released"):
            await out(helper, attacker)
        assert marker.exists()
        assert (await helper.states([attacker.pid])).processes[attacker.pid].state is State.LOCKED
        assert memory.record(ArenaOwner.of(attacker.pid)).pending
        with pytest.raises(NotInArena, match=f"of process {attacker.pid} were never copied to the arena"):
            arena_files.hold(memory, [attacker.pid])
        assert saved_values(memory, attacker, tmp_path) <= set(ATTACKERS)

    use_arena(body)


@pytest.mark.parametrize(
    ("method", "nth", "after"),
    [("cuda_worker.copier.ArenaCopier.out", 3, True), ("arena.memory.Memory.confirm", 1, False)],
)
def test_memory_that_is_given_up_before_its_copy_is_the_programs_own(
    use_arena: Run,
    secrets: None,
    start_holder: Hold,
    hostile: Callable[[str, str], Path],
    fault: Callable[..., Path],
    memory: Memory,
    tmp_path: Path,
    method: str,
    nth: int,
    after: bool,
) -> None:
    """The worker dies before the copy is made, which another one makes of what a holder has kept."""
    attacker = attackers(start_holder, library=hostile(HONEST, LIE))
    marker = fault(method, nth, after=after)

    async def body(helper: CudaHelper) -> None:
        assert (await out(helper, attacker)).taken.bytes == PIECES * PIECE
        assert marker.exists()
        assert not memory.record(ArenaOwner.of(attacker.pid)).pending
        assert saved_values(memory, attacker, tmp_path) == set(ATTACKERS)
        await resume(helper, [attacker.pid], limits=LIMITS)

    use_arena(body)
    assert attacker.is_right()


@pytest.mark.parametrize(
    ("method", "nth", "after", "finished"),  # whether another worker finishes what the dead one has begun
    [
        ("arena.memory.Memory.update", 1, False, False),
        ("arena.memory.Memory.update", 1, True, False),
        ("cuda_worker.copier.ArenaCopier.out", 2, True, True),
        ("arena.memory.Memory.confirm", 2, False, True),
        ("arena.memory.Memory.confirm", 2, True, True),
        ("arena.memory.Memory.confirm", 5, True, True),
    ],
)
def test_process_has_its_own_bytes_wherever_the_worker_dies(
    use_arena: Run,
    secrets: None,
    start_holder: Hold,
    fault: Callable[..., Path],
    memory: Memory,
    method: str,
    nth: int,
    after: bool,
    finished: bool,
) -> None:
    holder = attackers(start_holder)
    marker = fault(method, nth, after=after)

    async def body(helper: CudaHelper) -> None:
        suspended = await out(helper, holder)
        assert marker.exists()
        if finished:
            assert suspended.taken.bytes == PIECES * PIECE
        else:
            assert "was killed by SIGKILL" in suspended.taken.reasons[holder.pid]
        await resume(helper, [holder.pid], limits=LIMITS)
        assert holder.is_right()
        assert (await out(helper, holder)).taken.bytes == PIECES * PIECE
        await resume(helper, [holder.pid], limits=LIMITS)

    use_arena(body)
    assert holder.is_right()
    assert memory.free() == memory.size


HANDED = "block->fd = fd;"
LIES = {  # what the library's text says, what it says instead, and in which file
    "page that must not be written": ("SHRINK | GROW)", "SHRINK | GROW | 16 /* F_SEAL_FUTURE_WRITE */)", "blocks.c"),
    "descriptor of a pipe": (HANDED, "close(fd); int both[2]; block->fd = pipe(both) ? -1 : both[0];", "exports.c"),
    "no such device": (HANDED, f"{HANDED} block->device = INT32_MAX;", "exports.c"),
}


def test_libraries_that_lie_cost_no_other_process(
    use_arena: Run, start_holder: Hold, hostile: Callable[..., Path], memory: Memory, socket: Path
) -> None:
    liars = [start_holder(1, library=hostile(*lie)) for lie in LIES.values()]
    honest = start_holder(PIECES)
    hasty = StepSeconds(lock=5, checkpoint=3, restore=3, unlock=5, settle=5)

    async def leave_and_return(helper: CudaHelper, liar: Holder) -> None:
        with suppress(CudaError):
            await out(helper, liar, hasty)
        with suppress(CudaError):
            await resume(helper, [liar.pid], limits=hasty)

    async def body(helper: CudaHelper) -> None:
        lying = asyncio.gather(*(leave_and_return(helper, liar) for liar in liars))
        cycles = 0
        while not lying.done() or not cycles:
            assert (await out(helper, honest)).taken.bytes == PIECES * PIECE
            await resume(helper, [honest.pid], limits=LIMITS)
            assert honest.is_right()
            cycles += 1
        await lying
        assert "Traceback" not in log_path(socket).read_text()

    use_arena(body)
    for liar in liars:
        liar.kill()
    assert memory.free() == memory.size


NUMBERS = (0, 1, 2, 5, 63, 64, 255, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
TABLE, ENTRY = control.TABLE_AT, control.BLOCK.size
SCRIBBLED = {  # where in the control page a program writes any number, again and again
    "kind and pids": range(0, 16, 4),
    "questions": [control.ASKED],
    "answers": [control.ANSWERED, control.RESULT],
    "what is asked": [control.VERB, control.FIRST, control.COUNT],
    "length of the table, imports, uses": [control.USED, control.IMPORTS, control.WATCHED, control.USES],
    "addresses, sizes and handles of blocks": [TABLE + ENTRY * n + at for n in range(8) for at in range(0, 32, 4)],
    "states of blocks": [TABLE + ENTRY * n + 32 for n in range(8)],
    "flags, devices and descriptors of blocks": [TABLE + ENTRY * n + at for n in range(8) for at in range(36, 48, 4)],
    "all of it": range(0, TABLE + 16 * ENTRY, 4),
}


@contextmanager
def scribbling(pid: int, places: Sequence[int], seed: str) -> Iterator[None]:
    """Write into the control page of a process, as a thread of its own would."""
    found = control.control_of(pid)
    assert found is not None
    done, chosen = Event(), Random(seed)

    def write() -> None:
        while not done.wait(0.0005):
            number = chosen.choice(NUMBERS) if chosen.random() < 0.7 else chosen.getrandbits(32)
            struct.pack_into("<I", found._map, chosen.choice(places), number)

    with found, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            yield
        finally:
            done.set()
            writing.result()


@pytest.mark.parametrize("places", SCRIBBLED.values(), ids=SCRIBBLED)
def test_garbage_in_a_control_page_is_no_other_processs(
    use_arena: Run, start_holder: Hold, memory: Memory, socket: Path, places: Sequence[int], request: Any
) -> None:
    liar, honest = start_holder(PIECES), start_holder(PIECES)
    hasty = StepSeconds(lock=2, checkpoint=2, restore=2, unlock=2, settle=2)

    async def attack(helper: CudaHelper) -> None:
        for _ in range(4):
            with suppress(CudaError, VramError):
                await out(helper, liar, hasty)
            with suppress(CudaError, VramError):
                await resume(helper, [liar.pid], limits=hasty)

    async def body(helper: CudaHelper) -> None:
        await out(helper, liar)  # its page is there from now on
        await resume(helper, [liar.pid], limits=LIMITS)
        (process,) = helpers(socket)
        with scribbling(liar.pid, list(places), request.node.name):
            lying = asyncio.create_task(asyncio.wait_for(attack(helper), 120))
            cycles = 0
            while not lying.done() or not cycles:
                assert (await out(helper, honest)).taken.bytes == PIECES * PIECE
                await resume(helper, [honest.pid], limits=LIMITS)
                assert honest.is_right()
                cycles += 1
            await lying
        assert helpers(socket) == [process]
        assert "Traceback" not in log_path(socket).read_text()

    use_arena(body)
    liar.kill()
    assert honest.is_right()
    assert memory.free() == memory.size


def test_process_that_never_answers_stalls_no_other(
    use_arena: Run, start_holder: Hold, hostile: Callable[[str, str], Path], socket: Path
) -> None:
    """Its library takes a question and does not come back; the worker gives it up and continues with the others."""
    silent = start_holder(1, library=hostile("case SHARE:", "case SHARE: for (;;) usleep(1000);"))
    honest = start_holder(PIECES)
    hasty = StepSeconds(lock=5, checkpoint=1, restore=1, unlock=5, settle=5)

    async def body(helper: CudaHelper) -> None:
        await out(helper, honest)
        await resume(helper, [honest.pid], limits=LIMITS)
        (before,) = arena_workers(socket)
        stalling = asyncio.ensure_future(out(helper, silent, hasty))
        cycles = 0
        while not stalling.done():
            assert (await out(helper, honest)).taken.bytes == PIECES * PIECE
            await resume(helper, [honest.pid], limits=LIMITS)
            assert honest.is_right()
            cycles += 1
        with suppress(CudaError):
            await stalling
        assert cycles > 1
        log = log_path(socket).read_text()
        assert arena_workers(socket) == [before], log
        assert "the arena's worker had not answered" not in log

    use_arena(body)


def test_what_lies_in_the_arena_is_for_root_alone(use_arena: Run, start_holder: Hold, memory: Memory) -> None:
    holder = start_holder(PIECES)

    async def body(helper: CudaHelper) -> None:
        await out(helper, holder)
        await resume(helper, [holder.pid], limits=LIMITS)
        await out(helper, holder)

    before = os.umask(0)
    try:
        use_arena(body)
    finally:
        os.umask(before)
    folder = memory.file.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.suffix != ".cubin"} == {0o600}

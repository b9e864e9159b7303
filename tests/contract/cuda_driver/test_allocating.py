"""Programs that allocate and free while they are suspended: none is caught in the middle of it, and none waits long."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.control import BlockState, Control, ControlFailed, Verb, control_of
from kybernate_shim.gpu.helper_client import CudaHelper, log_path
from kybernate_shim.gpu.sequence import StepSeconds, resume, suspend
from tests.contract.cuda_driver.cycles import LIMITS, cycle
from tests.fakes.actor import eventually
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.build import SOURCES
from tests.fakes.cuda.programs import Holder, Program

Run = Callable[[Callable[[CudaHelper], Any]], Any]
Hold = Callable[..., Holder]

pytestmark = pytest.mark.root
PIECES, PIECE = 4, 2 << 20
CALLS = 4  # of the driver for an allocation: reserve, create, map, set access
CYCLES = 20
HEAP_CYCLES = 6
STEPS = ("make", "map", "open", "write", "close", "release")
WORKER = 10 << 20  # what the arena's worker has of a GPU: a context, and room for hashes
ANSWER = 5.0
MOMENT = 0.2  # of the second that a table stays shut
PATIENCE = 30.0

HASTY = StepSeconds(lock=PATIENCE, checkpoint=5, restore=5, unlock=PATIENCE, settle=PATIENCE)


@pytest.fixture
def hold(start_holder: Hold) -> Hold:
    """Start a Holder of PIECES in one allocation."""
    return partial(start_holder, PIECES)


@pytest.fixture
def page(hold: Hold) -> Iterator[tuple[Holder, Control]]:
    """A holder and its control page."""
    holder = hold()
    control = control_of(holder.pid)
    assert control is not None
    with control:
        yield holder, control


def busy(socket: Path) -> list[str]:
    """Return what was answered to takes that came in the middle of an allocation."""
    lines = [json.loads(line) for line in log_path(socket).read_text().splitlines() if line.startswith("{")]
    return [line["error"] for line in lines if line["event"] == "arena.offloaded" and "error" in line]


def test_program_that_allocates_without_a_pause_is_hardly_ever_caught_at_it(
    use_arena: Run, hold: Hold, gpus: Gpus, socket: Path
) -> None:
    """Never, unless this machine stalls for a second."""
    holder = hold()

    async def body(helper: CudaHelper) -> None:
        await cycle(helper, holder.pid)
        before = gpus.used()[0]
        holder.do("churn")
        for _ in range(CYCLES):
            taken = (await suspend(helper, lambda: [holder.pid], LIMITS, arena=True)).taken
            assert not taken.reasons
            await resume(helper, [holder.pid], limits=LIMITS)
            assert holder.is_right()
            assert gpus.used()[0] <= before + 2 * PIECE

    use_arena(body)
    assert len(busy(socket)) < CYCLES // 5


def test_program_is_not_stopped_where_it_has_the_lock_of_its_heap(
    use_arena: Run, gpus: Gpus, libraries: Path, preload: Path
) -> None:
    """The driver needs that lock, and could never lock the process again."""
    variables = {"LD_PRELOAD": str(preload), "MALLOC_ARENA_MAX": "1"}
    program = Program(
        [sys.executable, SOURCES / "trims.py", "4", "1"], dict(os.environ) | gpus.environment(libraries) | variables
    )

    async def body(helper: CudaHelper) -> None:
        program.wait_for_steps(1)
        for _ in range(HEAP_CYCLES):
            await suspend(helper, lambda: [program.pid], HASTY, arena=True)
            await resume(helper, [program.pid], limits=HASTY)
            program.computes_on()

    try:
        use_arena(body)
    finally:
        program.kill()


def test_older_library_is_caught_and_let_go_until_it_is_between_two(
    use_arena: Run, hold: Hold, older: Callable[[str], Path]
) -> None:
    """A container that was started before an upgrade of the node has one that does not know of SHUT."""
    holder = hold(library=older("SHUT"))
    holder.do("churn")

    async def body(helper: CudaHelper) -> None:
        for _ in range(CYCLES):
            await cycle(helper, holder.pid)
            assert holder.is_right()

    use_arena(body)


@pytest.mark.parametrize("late", range(len(STEPS)))
def test_what_is_begun_while_memory_is_away_is_done_when_it_is_back(
    use_arena: Run, page: tuple[Holder, Control], gpus: Gpus, late: int
) -> None:
    holder, control = page
    before = gpus.used()[0]

    async def body(helper: CudaHelper) -> None:
        for step in STEPS[:late]:
            holder.do(step)
        await suspend(helper, lambda: [holder.pid], LIMITS, arena=True)
        holder.begin(STEPS[late])
        assert not holder.has_answered(MOMENT)
        await resume(helper, [holder.pid], limits=LIMITS)
        assert holder.has_answered(PATIENCE)
        await cycle(helper, holder.pid)
        for step in STEPS[late + 1 :]:
            holder.do(step)
        await cycle(helper, holder.pid)

    use_arena(body)
    assert holder.is_right()
    assert [block.state for block in control.blocks()] == [BlockState.HERE]
    assert gpus.used()[0] == before + WORKER


def test_nobody_begins_while_the_table_is_shut(page: tuple[Holder, Control]) -> None:
    holder, control = page
    control.ask(Verb.SHUT, seconds=ANSWER)
    holder.begin("renew")
    assert not holder.has_answered(MOMENT)
    control.ask(Verb.SHARE, seconds=ANSWER, first=0, count=0)
    assert holder.has_answered(PATIENCE)


def test_program_goes_on_by_itself_where_the_helper_is_gone(page: tuple[Holder, Control]) -> None:
    holder, control = page
    control.ask(Verb.SHUT, seconds=ANSWER)
    holder.begin("renew")
    assert not holder.has_answered(MOMENT)
    assert holder.has_answered(PATIENCE)


def test_allocation_that_was_begun_is_told_of(hold: Hold) -> None:
    holder = hold(switches=f"vmm:{CALLS + 3}:hang")
    holder.begin("renew")
    control = control_of(holder.pid)
    assert control is not None
    with control:
        assert eventually(lambda: busy_at_once(control), seconds=PATIENCE), "it has not come to the call that hangs"


def busy_at_once(control: Control) -> bool:
    """Shut the table, tell whether a process was at it, and open it again."""
    try:
        control.ask(Verb.SHUT, seconds=ANSWER)
    except ControlFailed as error:
        return error.busy
    finally:
        with suppress(ControlFailed):
            control.ask(Verb.SHARE, seconds=ANSWER, first=0, count=0)
    return False

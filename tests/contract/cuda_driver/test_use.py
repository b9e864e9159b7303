"""A suspended process that uses the GPU is found: by the library in it, or from outside where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.use import Calls, Process, pages_of, switches_of
from kybernate_shim.gpu.helper_client import CudaHelper
from tests.contract.cuda_driver.conftest import Use
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Holder, Program
from tests.stillness import come_to_rest
from tests.system.ctr import eventually

pytestmark = pytest.mark.root
PATIENCE = 20.0


@pytest.fixture
def suspended(use: Callable[[Use], Any]) -> Callable[[int], Any]:
    """Suspend a process by the driver's means."""

    @contextmanager
    def suspend(pid: int) -> Iterator[None]:
        async def leave(helper: CudaHelper) -> None:
            await helper.lock([pid], PATIENCE)
            await helper.checkpoint([pid], PATIENCE)

        async def come(helper: CudaHelper) -> None:
            await helper.restore([pid], PATIENCE)
            await helper.unlock([pid], PATIENCE)

        use(leave)
        try:
            yield
        finally:
            use(come)

    return suspend


@contextmanager
def watched(pid: int) -> Iterator[Process]:
    process = Process(pid)
    try:
        yield process
    finally:
        process.close()


def is_used(process: Process) -> bool:
    return process.is_noted() or process.waits({})


def test_call_of_a_suspended_process_is_noted_by_the_library(start_holder: Any, suspended: Any) -> None:
    holder: Holder = start_holder(1)
    with suspended(holder.pid), watched(holder.pid) as process:
        assert process.page is not None
        assert not process.is_noted()
        holder.begin("content")
        assert eventually(process.is_noted)
    assert holder.has_answered(PATIENCE)


@pytest.mark.parametrize("question", ["content", "renew", "make", "churn"])
def test_each_kind_of_call_is_noted(start_holder: Any, suspended: Any, question: str) -> None:
    holder: Holder = start_holder(1)
    with suspended(holder.pid), watched(holder.pid) as process:
        holder.begin(question)
        assert eventually(process.is_noted)
    assert holder.has_answered(PATIENCE)


def test_look_at_free_memory_is_no_use(start_holder: Any, suspended: Any) -> None:
    holder: Holder = start_holder(1)
    with suspended(holder.pid), watched(holder.pid) as process:
        holder.begin("look")
        assert eventually(lambda: process.waits({}))
        assert not process.is_noted()
    assert holder.has_answered(PATIENCE)


def test_call_is_found_from_outside_without_the_library(gpus: Gpus, libraries: Path, suspended: Any) -> None:
    holder = Holder(gpus, libraries, 1)
    try:
        with suspended(holder.pid), watched(holder.pid) as process:
            assert process.page is None
            assert process.uses_driver
            assert not process.waits({})
            before = switches_of(holder.pid)
            holder.begin("content")
            assert eventually(lambda: process.waits(before))
        assert holder.has_answered(PATIENCE)
    finally:
        holder.kill()


@pytest.mark.parametrize("with_library", [False, True])
def test_program_that_was_at_work_waits_already(start: Any, preload: Path, suspended: Any, with_library: bool) -> None:
    program: Program = start(preload=preload if with_library else None)
    with suspended(program.pid):
        come_to_rest([program.pid])
        with watched(program.pid) as process:
            assert process.waits({})
        with watched(program.pid) as process:
            assert not process.waits(switches_of(program.pid))
    program.computes_on()


def test_process_that_is_not_suspended_is_not_slowed_down(start: Any, preload: Path) -> None:
    """The first call ends the watch, and each other call is the driver's own."""
    program: Program = start(preload=preload)
    with watched(program.pid) as process:
        assert eventually(process.is_noted)
        program.computes_on()
        assert process.page is not None
        assert process.page.uses() == 1


def test_calls_of_a_process_that_is_not_suspended_are_counted(start_holder: Any, gpus: Gpus, libraries: Path) -> None:
    holder: Holder = start_holder(1)
    plain = Holder(gpus, libraries, 1)
    calls = Calls()
    try:
        both = frozenset({holder.pid, plain.pid})
        assert calls.count() is None
        calls.follow(both, pages_of(both))
        assert calls.processes == both
        assert (first := calls.count()) is not None
        assert calls.count() == first
        holder.begin("look")  # at free memory, which is no work
        assert holder.has_answered(PATIENCE)
        assert calls.count() == first
        holder.begin("content")
        assert holder.has_answered(PATIENCE)
        assert calls.count() == first + 1
        plain.begin("content")
        assert plain.has_answered(PATIENCE)
        assert calls.count() == first + 1
        calls.follow(frozenset({plain.pid}), {})
        assert calls.count() is None
    finally:
        calls.close()
        plain.kill()

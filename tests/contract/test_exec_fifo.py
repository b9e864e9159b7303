"""A start that spares the runtime: where it is the same as the runtime's own, and where that must do it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.config import Deadlines
from kybernate_shim.linux.process import start_time
from kybernate_shim.oci.exec_fifo import program_of
from kybernate_shim.oci.runtime import Runtime, RuntimeFailed, RuntimeTimedOut
from kybernate_shim.oci.spec import edit_spec
from tests.contract.runtime_bench import (
    FOREVER,
    Bench,
    Noting,
    Run,
    fixture_bench,
    pipe,
    read_all,
    until,
    write_program,
)

__all__ = ["fixture_bench"]
pytestmark = pytest.mark.root
RUNC_ALONE = pytest.mark.parametrize("bench", ["runc"], indirect=True)


async def start(b: Bench, pid: int, runtime: Runtime | None = None) -> list[str]:
    """Start what waits; return which of the runtime's commands that took."""
    noting = Noting(b.children)
    await replace(runtime or b.runtime, children=noting).start(b.id, waiting=pid)
    return noting.verbs


def is_runc(b: Bench) -> bool:
    return b.runtime.cli.binary.name == "runc"


def test_runc_is_spared_and_crun_is_not(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            pid = await b.create("sh", "-c", "echo ran; exit 7", fds={1: out[1]})
            assert await start(b, pid) == ([] if is_runc(b) else ["start"])
            assert await b.status_of(pid) == 7
            assert read_all(out) == "ran\n"
        await b.until_state("stopped")

    bench(work)


def test_runtime_takes_it_for_running(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        await start(b, pid)
        assert (await b.state())["status"] == "running"
        with pytest.raises(RuntimeFailed, match="running" if is_runc(b) else "exec.fifo"):
            await b.runtime.start(b.id, waiting=pid)
        await b.exec("e", "true")
        await b.runtime.kill(b.id, signal.SIGKILL)
        assert await b.status_of(pid) == 128 + signal.SIGKILL

    bench(work)


def test_init_executes_its_program_on_return(bench: Run) -> None:
    """So that a signal is the program's, and a checkpoint does not meet the runtime's."""

    async def work(b: Bench) -> None:
        for number in range(20):
            pid = await b.create(*FOREVER)
            before = program_of(pid)
            await start(b, pid)
            assert program_of(pid) not in (None, before), f"start {number}"
            await b.runtime.delete(b.id, force=True)

    bench(work)


def test_hooks_after_the_start_are_run(bench: Run, tmp_path: Path) -> None:
    async def work(b: Bench) -> None:
        sign = tmp_path / "sign"
        b.write_spec(*FOREVER)
        # It takes what it is told: crun dies of SIGPIPE where a hook has ended before it was told everything.
        hook = write_program(tmp_path / "hooks/hook", f"cat >{sign}")
        edit_spec(b.bundle.path, lambda document: document.update(hooks={"poststart": [{"path": str(hook)}]}))
        await b.runtime.create(b.id, b.bundle, fds={})
        pid = b.watch(b.bundle.init_pid())
        assert await start(b, pid) == ["start"]
        assert json.loads(sign.read_text())["id"] == b.id

    bench(work)


@RUNC_ALONE
def test_script_in_the_place_of_runc_is_asked(bench: Run, tmp_path: Path) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        real = b.runtime.cli.binary
        script = write_program(tmp_path / "wrapped/runc", f'exec {real} "$@"')
        wrapped = replace(b.runtime, cli=replace(b.runtime.cli, binary=script))
        assert await start(b, pid, wrapped) == ["start"]

    bench(work)


def test_init_that_has_ended_is_refused_in_the_runtimes_words(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        await b.runtime.kill(b.id, signal.SIGKILL)
        await b.status_of(pid)
        with pytest.raises(RuntimeFailed, match="stopped" if is_runc(b) else "not running"):
            await start(b, pid)

    bench(work)


@RUNC_ALONE
def test_init_that_ends_instead_of_starting(bench: Run) -> None:
    """It is stopped when it is told to start, and killed then; no process waits for it."""

    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        await stop(b, pid)
        starting = asyncio.ensure_future(b.runtime.start(b.id, waiting=pid))
        await asyncio.sleep(0.2)
        assert not starting.done()
        await b.runtime.kill(b.id, signal.SIGKILL)
        with pytest.raises(RuntimeFailed, match="stopped"):
            await starting

    bench(work)


@RUNC_ALONE
def test_init_that_cannot_run_meets_the_deadline(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        await stop(b, pid)
        impatient = replace(b.runtime, deadlines=Deadlines(start=0.3))
        with pytest.raises(RuntimeTimedOut, match=f"{pid}.*0.3 s"):
            await impatient.start(b.id, waiting=pid)

    bench(work)


def test_other_process_of_that_number_is_no_init(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        begun = start_time(pid)
        assert await start(b, pid + 1) == ["start"]
        assert start_time(pid) == begun
        assert (await b.state())["status"] == "running"

    bench(work)


async def stop(b: Bench, pid: int) -> None:
    """Freeze init where it waits, without its runtime's knowledge."""
    os.kill(pid, signal.SIGSTOP)

    async def stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    await until(stopped, f"{pid} stands still")

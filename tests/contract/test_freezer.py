"""A pause that spares the runtime: the same to the runtime as its own, and its own wherever it must be."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from kybernate_shim.errors import Missing
from kybernate_shim.linux.cgroup.cgroup import Cgroup, FreezeTimedOut
from kybernate_shim.oci import freezer
from kybernate_shim.oci.runtime import Runtime, RuntimeFailed, RuntimeTimedOut
from tests.contract.runtime_bench import FOREVER, Bench, Noting, Run, fixture_bench, pipe, write_program

__all__ = ["fixture_bench"]
pytestmark = pytest.mark.root
RUNC_ALONE = pytest.mark.parametrize("bench", ["runc"], indirect=True)


@pytest.fixture
def no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's crun is one."""
    monkeypatch.setattr(freezer, "is_compiled", lambda program: True)


async def verbs_of(b: Bench, change: Callable[[Runtime], Awaitable[None]], runtime: Runtime | None = None) -> list[str]:
    """Pause or resume, and return which of the runtime's commands that took."""
    noting = Noting(b.children)
    await change(replace(runtime or b.runtime, children=noting))
    return noting.verbs


@pytest.mark.usefixtures("no_script")
def test_runtime_is_spared_and_takes_it_for_its_own(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            pid = await b.run("sh", "-c", "while :; do echo tick; sleep 0.01; done", fds={1: out[1]})
            cgroup = Cgroup.of(pid)
            assert await asyncio.to_thread(os.read, out[0], 1)
            os.set_blocking(out[0], False)
            for _ in range(3):
                assert await verbs_of(b, lambda runtime: runtime.pause(b.id, cgroup)) == []
                assert (await b.state())["status"] == "paused"
                os.read(out[0], 1 << 20)
                await asyncio.sleep(0.1)
                with pytest.raises(BlockingIOError):
                    os.read(out[0], 1)
                assert await verbs_of(b, lambda runtime: runtime.resume(b.id, cgroup)) == []
                assert (await b.state())["status"] == "running"
                await asyncio.sleep(0.1)
                assert os.read(out[0], 4) == b"tick"
            await verbs_of(b, lambda runtime: runtime.pause(b.id, cgroup))
            await b.runtime.resume(b.id)  # by whatever it was paused
            await b.runtime.pause(b.id)
            await b.until_state("paused")
            assert await verbs_of(b, lambda runtime: runtime.resume(b.id, cgroup)) == []

    bench(work)


@pytest.mark.usefixtures("no_script")
@pytest.mark.parametrize("paused", [False, True])
def test_signal_spares_the_runtime_and_ends_a_paused_container(bench: Run, paused: bool) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            script = "trap 'echo got' USR1; echo ready; while :; do sleep 0.05; done"
            pid = await b.run("sh", "-c", script, fds={1: out[1]})
            cgroup = Cgroup.of(pid)
            assert await asyncio.to_thread(os.read, out[0], 100) == b"ready\n"

            def kill(number: int) -> Callable[[Runtime], Awaitable[None]]:
                return lambda runtime: runtime.kill(b.id, number, init=pid, cgroup=cgroup)

            assert await verbs_of(b, kill(signal.SIGUSR1)) == []
            assert await asyncio.to_thread(os.read, out[0], 100) == b"got\n"
            if paused:
                await b.runtime.pause(b.id)
            assert await verbs_of(b, kill(signal.SIGKILL)) == []
            assert await b.status_of(pid) == 128 + signal.SIGKILL
            await b.until_state("stopped")
            with pytest.raises(
                Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
            ):
                await b.runtime.kill(b.id, signal.SIGTERM, init=pid, cgroup=cgroup)

    bench(work)


@RUNC_ALONE  # crun has nothing against it
def test_wrong_state_is_for_the_runtime_to_refuse(bench: Run) -> None:
    async def work(b: Bench) -> None:
        cgroup = Cgroup.of(await b.run(*FOREVER))
        with pytest.raises(RuntimeFailed):
            await b.runtime.resume(b.id, cgroup)
        await b.runtime.pause(b.id, cgroup)
        with pytest.raises(RuntimeFailed):
            await b.runtime.pause(b.id, cgroup)
        await b.runtime.resume(b.id, cgroup)

    bench(work)


def test_script_in_the_runtimes_place_is_asked(bench: Run, tmp_path: Path) -> None:
    async def work(b: Bench) -> None:
        cgroup = Cgroup.of(await b.run(*FOREVER))
        program = write_program(tmp_path / b.runtime.cli.binary.name, f'exec {b.runtime.cli.binary} "$@"')
        script = replace(b.runtime, cli=replace(b.runtime.cli, binary=program))
        assert await verbs_of(b, lambda runtime: runtime.pause(b.id, cgroup), script) == ["pause"]
        await b.until_state("paused")
        assert await verbs_of(b, lambda runtime: runtime.resume(b.id, cgroup), script) == ["resume"]
        await b.until_state("running")

    bench(work)


@RUNC_ALONE
def test_process_that_does_not_stop_is_told_of(bench: Run) -> None:
    class Unwilling:
        frozen = False

        def freeze(self, *, timeout: float) -> None:
            raise FreezeTimedOut(f"cgroup x was not frozen within {timeout:g} s")

    async def work(b: Bench) -> None:
        await b.run(*FOREVER)
        with pytest.raises(RuntimeTimedOut, match="was not frozen within 30 s"):
            await b.runtime.pause(b.id, cast("Cgroup", Unwilling()))

    bench(work)

"""The helper process: what it survives, how it starts and ends, and what it says when the driver cannot be used."""

from __future__ import annotations

import asyncio
import os
import signal
import socket as socketlib
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kybernate_shim.gpu.errors import CudaCallFailed, CudaHelperLost, CudaUnavailable
from kybernate_shim.gpu.helper_answers import State
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper, log_path, start_helper
from kybernate_shim.messages import cuda_pb2 as wire
from tests.contract.cuda_driver.helper_processes import PATIENCE, called, helpers
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Program

Start = Callable[..., Program]
Run = Callable[[Callable[[CudaHelper], Any]], Any]

pytestmark = pytest.mark.root


def eventually(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not after {seconds} s: {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["hang", "hang-after", "crash"])
def test_driver_call_that_takes_its_worker_costs_no_other_call(
    use: Run, start: Start, gpus: Gpus, socket: Path, how: str
) -> None:
    bad, good, elsewhere = start(), start(), start()
    gpus.switch(f"lock:1:{how}@{bad.pid}")
    gpus.slow(20)  # the other caller's checkpoint takes 0.2 s for 10 MiB

    async def body(helper: CudaHelper) -> None:
        await helper.lock([elsewhere.pid], PATIENCE)
        supervisor = helpers(socket)[0].pid
        other = asyncio.create_task(helper.checkpoint([elsewhere.pid], PATIENCE))
        with pytest.raises(CudaCallFailed) as caught:
            await helper.lock([bad.pid, good.pid], 0.2)
        told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert any(f"lock of process {bad.pid}" in line for line in told)
        assert ("was not answered" not in str(caught.value)) == (how == "crash")
        await other
        states = (await helper.states([bad.pid, good.pid])).processes
        assert states[bad.pid].state is (State.LOCKED if how == "hang-after" else State.RUNNING)
        for process in states.values():
            if process.state is State.LOCKED:
                await helper.unlock([process.pid], PATIENCE)
        await helper.restore([elsewhere.pid], PATIENCE)
        await helper.unlock([elsewhere.pid], PATIENCE)
        assert [process.pid for process in helpers(socket)] == [supervisor]

    use(body)
    for program in (bad, good, elsewhere):
        program.computes_on()


def test_hung_worker_is_killed(use: Run, start: Start, gpus: Gpus, socket: Path) -> None:
    program = start()
    gpus.switch("lock:*:hang")

    async def body(helper: CudaHelper) -> None:
        await helper.info()
        before = {worker.pid for worker in helpers(socket)[0].children()}
        with pytest.raises(CudaCallFailed, match="was not answered"):
            await helper.lock([program.pid], 0.1)
        eventually(lambda: before - {it.pid for it in helpers(socket)[0].children()}, "a worker is gone")

    use(body)


def test_helper_that_is_killed_is_replaced(use: Run, start: Start, gpus: Gpus, socket: Path) -> None:
    program = start()
    gpus.slow(100)  # 1 s

    async def body(helper: CudaHelper) -> None:
        await helper.lock([program.pid], PATIENCE)
        gpus.record()
        checkpoint = asyncio.create_task(helper.checkpoint([program.pid], PATIENCE))
        await called(gpus, "checkpoint")
        workers = helpers(socket)[0].children()
        helpers(socket)[0].send_signal(signal.SIGKILL)
        with pytest.raises(CudaHelperLost, match="CUDA Checkpoint: the helper ended before it answered"):
            await checkpoint
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive  # workers do not outlive their supervisor
        # The driver continues by itself, and asking for the state waits for it.
        assert (await helper.states([program.pid])).processes[program.pid].state is State.CHECKPOINTED
        await helper.restore([program.pid], PATIENCE)
        await helper.unlock([program.pid], PATIENCE)

    use(body)
    program.computes_on()


def test_missing_call_is_named(use: Run, start: Start, gpus: Gpus) -> None:
    program = start()
    gpus.missing("cuCheckpointProcessLock", "cuCheckpointProcessRestore")

    async def body(helper: CudaHelper) -> None:
        assert (await helper.info()).missing_calls == ("cuCheckpointProcessLock", "cuCheckpointProcessRestore")
        with pytest.raises(CudaCallFailed, match=r"cuCheckpointProcessLock.* not found"):
            await helper.lock([program.pid], 1)

    use(body)
    program.computes_on()


def test_missing_driver_is_named(use: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(CudaUnavailable, match=r"the CUDA driver cannot be loaded: .*cuda"):
        use(lambda helper: helper.info())


def test_driver_without_gpus_is_named(use: Run, gpus: Gpus) -> None:
    (gpus.directory / "gpus").unlink()
    with pytest.raises(CudaUnavailable, match="does not initialize: CUDA_ERROR_NO_DEVICE"):
        use(lambda helper: helper.states([1]))


def test_driver_that_crashes_at_its_start_is_named(use: Run, gpus: Gpus) -> None:
    gpus.switch("init:1:crash")
    with pytest.raises(CudaUnavailable, match=r"does not initialize: the worker process .* was killed by SIGSEGV"):
        use(lambda helper: helper.info())


def test_helper_sees_all_gpus_whatever_the_shim_was_shown(use: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(use(lambda helper: helper.info()).gpus) == 2


def test_helper_takes_no_memory_of_the_gpus(use: Run, start: Start, gpus: Gpus) -> None:
    program = start()
    used = gpus.used()
    use(lambda helper: helper.lock([program.pid], PATIENCE))
    assert gpus.used() == used
    use(lambda helper: helper.unlock([program.pid], PATIENCE))


def test_supervisor_does_not_load_the_driver(use: Run, socket: Path) -> None:
    use(lambda helper: helper.info())
    (supervisor,) = helpers(socket)
    loaded = {Path(mapping.path).name for mapping in supervisor.memory_maps()}
    workers = {Path(mapping.path).name for worker in supervisor.children() for mapping in worker.memory_maps()}
    assert "libcuda.so.1" not in loaded
    assert "libcuda.so.1" in workers


def test_one_of_many_helpers_that_start_at_once_stays(gpus: Gpus, socket: Path) -> None:
    started = [psutil.Process(start_helper(socket)) for _ in range(5)]
    ended = lambda process: process.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    eventually(lambda: sum(map(ended, started)) == 4, "four of five helpers have ended")
    assert [os.waitpid(process.pid, 0)[1] for process in started if ended(process)] == [0] * 4

    async def main() -> None:
        async with cuda_helper(socket, start=False) as helper:
            await helper.info()

    asyncio.run(main())


def test_idle_helper_ends_and_the_next_call_starts_another(gpus: Gpus, socket: Path) -> None:
    async def main() -> None:
        async with cuda_helper(socket, idle_seconds=0.5) as helper:
            await helper.info()
            first = helpers(socket)[0].pid
            await asyncio.to_thread(eventually, lambda: not socket.exists(), "the idle helper has ended")
            await helper.info()
            assert helpers(socket)[-1].pid != first

    asyncio.run(main())


def test_busy_helper_is_not_idle(gpus: Gpus, socket: Path, start: Start) -> None:
    program = start()
    gpus.slow(150)  # 1.5 s for 10 MiB

    async def main() -> None:
        async with cuda_helper(socket, idle_seconds=0.3) as helper:
            await helper.lock([program.pid], PATIENCE)
            await helper.checkpoint([program.pid], PATIENCE)
            await helper.restore([program.pid], PATIENCE)
            await helper.unlock([program.pid], PATIENCE)

    asyncio.run(main())
    program.computes_on()


def test_nobody_else_may_use_the_helper(use: Run, socket: Path) -> None:
    use(lambda helper: helper.info())
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    socket.parent.chmod(0o711)
    socket.chmod(0o666)  # a peer of another user is disconnected before it is heard, whatever the file allows
    child = os.fork()
    if not child:
        status = 3
        try:
            status = _try_as_nobody(socket)
        finally:
            os._exit(status)  # this is a copy of the test's own process, which must not continue with other tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _try_as_nobody(path: Path) -> int:
    """Connect as another user and return 0 when the server hangs up immediately."""
    os.chdir(path.parent)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with socketlib.socket(socketlib.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path.name)
        try:
            return int(connection.recv(1) != b"")
        except ConnectionResetError:
            return 0
        except TimeoutError:
            return 2


def test_call_without_a_time_out_is_refused(use: Run) -> None:
    async def body(helper: CudaHelper) -> None:
        with pytest.raises(CudaHelperLost, match=r"INVALID_ARGUMENT.*Lock needs a timeout"):
            await helper._change("Lock", wire.VerbRequest(pids=[1]), 5)

    use(body)


def test_log_tells_every_verb(use: Run, start: Start, socket: Path) -> None:
    program = start()
    use(lambda helper: helper.lock([program.pid], PATIENCE))
    use(lambda helper: helper.unlock([program.pid], PATIENCE))
    log = log_path(socket).read_text()
    assert f'"pid": {program.pid}' in log
    assert '"event": "cuda.locked"' in log
    assert '"event": "cuda.unlocked"' in log


def test_info_has_when_processes_computed(use: Run, gpus: Gpus) -> None:
    def computed() -> list[Any]:
        return [gpu.computed for gpu in use(lambda helper: helper.info()).gpus]

    def sampled() -> set[int]:
        return {gpu.sampled for gpu in use(lambda helper: helper.info()).gpus}

    count = len(gpus.uuids)
    assert computed() == [{}] * count
    assert sampled() == {0}
    gpus.load((7, 500, 30), (7, 700, 1), (8, 700, 0), (9, 100, 100))
    assert computed() == [{7: 700, 9: 700}] * count
    gpus.load((7, 500, 30), (7, 700, 1), (7, 900, 0), (8, 900, 2), (9, 900, 0))  # NVML keeps those of some seconds
    assert computed() == [{7: 700, 8: 900, 9: 700}] * count
    gpus.load((7, 1000, 0))  # a process at rest is sampled too
    assert computed() == [{7: 700, 8: 900, 9: 700}] * count
    assert sampled() == {1000}
    gpus.split()  # NVML has no samples then
    assert computed() == [None] * count

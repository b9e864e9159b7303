"""A status waits for nothing: counted, not timed, by what the event loop's thread opens, lists and locks."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.gpu import helper_client
from kybernate_shim.gpu.helper_answers import CudaProcess, State, States
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.task import gpu_report
from kybernate_shim.task.service import TaskService
from kybernate_shim.task.shim_service import ShimService
from tests.unit.task.runtime import Life

ME = os.getpid()
LISTING = ("open", "os.listdir", "os.scandir")
LOCKING = ("fcntl.flock", "fcntl.lockf", "fcntl.fcntl")


class Watch:
    """Counts, by thread, what Python does to processes' files and to locks while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.seen: Counter[tuple[int, str]] = Counter()
        sys.addaudithook(self._hear)  # for good: there is no way to remove it

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (what := _of(event, arguments)):
            self.seen[threading.get_ident(), what] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.seen.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def count(self, what: str, *, here: bool) -> int:
        """Return how often it was seen in this thread, or in all others."""
        mine = threading.get_ident()
        return sum(n for (thread, kind), n in self.seen.items() if kind == what and (thread == mine) is here)


def _of(event: str, arguments: tuple[Any, ...]) -> str:
    if event in LOCKING:
        return "lock"
    place = arguments[0] if event in LISTING and arguments else ""
    name = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ""
    return "processes" if name.startswith(("/proc", "/sys/fs/cgroup")) else ""


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


class Helper:
    async def states(self, pids: Sequence[int], timeout: float) -> States:
        return States({pid: CudaProcess(pid, State.CHECKPOINTED, 0) for pid in pids}, {})


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShimService:
    """A daemon with a running container, whose one process is this one, and which the driver has checkpointed."""

    @asynccontextmanager
    async def helper() -> AsyncIterator[Helper]:
        yield Helper()

    def holders(pids: Sequence[int]) -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}/maps").read_text()]

    monkeypatch.setattr(helper_client, "cuda_helper", helper)
    monkeypatch.setattr(gpu_report, "holders", holders)
    life = Life(tmp_path)
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text(str(ME))
    life.container.cgroup = Cgroup(2, {"": cgroup})
    life.container.init.pid = ME
    life.container.init.move("start")
    tasks = TaskService("ns", life.children, lambda *_: None, structlog.get_logger(), cast(Any, None))
    tasks.settings = LiveConfig(structlog.get_logger(), tmp_path / "shim.toml")
    tasks.containers["c1"] = life.container
    return ShimService(tasks)


def ask(shim: ShimService, watch: Watch, *, gpu: bool = False) -> wire.Container:
    """Return the status of the container, its second one: a first one loads modules."""

    async def twice() -> wire.Container:
        request = wire.StatusRequest(gpu=gpu)
        await shim.status(request)
        with watch.counting():
            reply = cast(wire.StatusResponse, await shim.status(request))
        return reply.containers[0]

    return asyncio.run(twice())


def container_of(shim: ShimService) -> Any:
    return shim._tasks.containers["c1"]


def test_status_reads_nothing_of_processes(shim: ShimService, watch: Watch) -> None:
    reply = ask(shim, watch)
    assert (reply.state, reply.gpu, reply.pid) == ("running", "attached", ME)
    assert not watch.seen


def test_status_with_the_drivers_word_looks_beside_the_event_loop(shim: ShimService, watch: Watch) -> None:
    reply = ask(shim, watch, gpu=True)
    assert (reply.gpu, list(reply.cuda_pids)) == ("suspended", [ME])
    assert watch.count("processes", here=False) == 1
    assert watch.count("processes", here=True) == 0
    assert watch.count("lock", here=True) == watch.count("lock", here=False) == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_status_in_the_middle_of_an_operation_looks_at_nothing(shim: ShimService, watch: Watch, gpu: bool) -> None:
    container = container_of(shim)
    container.gpu.begin("suspend")
    container.operations().current = Operation("suspend")

    async def locked() -> None:
        await container.lock.acquire()

    asyncio.run(locked())
    reply = ask(shim, watch, gpu=gpu)
    assert (reply.phase, reply.gpu) == ("suspend", "suspending")
    assert not watch.seen


def test_watch_sees_what_it_is_for(watch: Watch, tmp_path: Path) -> None:
    import fcntl

    with watch.counting(), (tmp_path / "file").open("w") as file:
        Path("/proc/self/stat").read_text()
        list(Path("/proc/self/fd").iterdir())
        fcntl.flock(file, fcntl.LOCK_EX)
    assert (watch.count("processes", here=True), watch.count("lock", here=True)) == (2, 1)

"""What is left when memory changes, a disk is full, or a process is killed during an offload."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kybernate_shim.checkpoint.gpu import vram
from kybernate_shim.checkpoint.gpu.vram import BytesLost, VramOffload
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.linux.children import Children
from kybernate_shim.vram_io.errors import FileFailed, RegionChanged, VramError
from tests.contract.vram_path.moving import (
    LOG,
    MIB,
    SETTINGS,
    assert_filled,
    flip,
    maps_and_fills,
    out,
    place,
    run,
    workers,
)
from tests.fakes.actor import Actor
from tests.fakes.memory_process import MemoryProcess

pytestmark = pytest.mark.root


@pytest.mark.parametrize("change", ["maps['vram'].resize(4 << 20)", "maps['vram'].close()"], ids=["shrunk", "unmapped"])
def test_region_that_changes_size_fails_the_checkpoint_alone(program: Actor, image: Path, change: str) -> None:
    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program)()
            program.ask(change)
            with pytest.raises(RegionChanged):
                async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                    raise AssertionError("it was moved out")
        assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_full_disk_fails_the_checkpoint_alone(program: Actor, tmp_path: Path) -> None:
    async def body(children: Children) -> None:
        with pytest.raises(FileFailed):
            async with out(children, tmp_path / "absent", maps_and_fills(program), program):
                raise AssertionError("it was moved out")
        assert program.resident_kib(place(program)) == 8 * 1024

    run(body)


def test_target_that_is_killed_in_the_middle_is_named(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program, size=64 * MIB)()
                for number in range(8):
                    program.region(f"more{number}", 64 * MIB)  # zeros, quick to make and slow enough to read

            worker = stop_worker()

            def kill() -> None:
                with stopped_worker(worker, lambda: any(image.iterdir())):
                    os.kill(program.pid, signal.SIGKILL)

            killing = asyncio.create_task(asyncio.to_thread(kill))
            with pytest.raises(VramError, match=r"has ended|no private memory|not all there"):
                await way.moved_out(image, Operation("checkpoint"), lambda: False).__aenter__()
            await killing
        assert list(image.iterdir()) == []

    run(body)


def test_worker_that_is_killed_after_the_drop_is_replaced(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program):
            for worker in workers():
                worker.kill()
            assert program.resident_kib(place(program)) == 0

    run(body)
    assert_filled(program)


def test_worker_that_is_killed_before_costs_only_the_fast_way(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program)()
            for worker in workers():
                worker.kill()
            (image / f"kybernate-vram-{program.pid}-0.bin").touch()  # as it would leave it
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                assert way.data_path.name == "plain"
                assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_worker_that_is_killed_after_some_parts_were_dropped_costs_only_the_fast_way(
    program: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path  # on a disk: in memory, nothing is dropped part by part
    monkeypatch.setattr(vram, "HOLD_SECONDS", 60.0)  # so much memory takes time to fill
    size = 255 * MIB  # four parts

    async def body(children: Children) -> None:
        way = VramOffload(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program, size=size)()
            killing = asyncio.create_task(
                asyncio.to_thread(kill_worker, stop_worker(), program, lambda: 0 < resident() < size // 1024)
            )
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                await killing
                assert (way.data_path.name, list(image.iterdir())) == ("plain", [])
                assert resident() == size // 1024

    def resident() -> int:
        return program.resident_kib(place(program, size=size))

    run(body)
    assert_filled(program, size)
    assert program.computes()


def stop_worker() -> psutil.Process:
    (worker,) = workers()
    worker.suspend()
    return worker


@contextmanager
def stopped_worker(worker: psutil.Process, look: Callable[[], bool]) -> Iterator[None]:
    """Have a stopped worker get on by a millisecond at a time until `look` is true, and on after the context."""
    while not look():
        worker.resume()
        time.sleep(0.001)
        worker.suspend()
    yield
    worker.resume()


def kill_worker(worker: psutil.Process, program: MemoryProcess, look: Callable[[], bool]) -> None:
    """Kill the worker once `look` is true, at a moment when it is not making a call in the program."""
    with suppress(psutil.NoSuchProcess), stopped_worker(worker, lambda: look() and not calls_madvise(program.pid)):
        worker.kill()


def calls_madvise(pid: int) -> bool:
    """Whether a thread of the program that is traced is in a call of madvise, or about to make it."""
    tasks = [
        task for task in Path(f"/proc/{pid}/task").iterdir() if "TracerPid:\t0\n" not in (task / "status").read_text()
    ]
    return any((task / "syscall").read_text().split()[0] in ("28", "running", "233") for task in tasks)


def test_bytes_that_cannot_be_put_back_are_lost_aloud(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        with pytest.raises(BytesLost, match="does not hold the bytes that were saved"):
            async with out(children, image, maps_and_fills(program), program) as way:
                flip(image / way.files[0].file)

    run(body)

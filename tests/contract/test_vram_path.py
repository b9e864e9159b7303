"""The whole way out and back of VRAM bytes, by real worker processes on real memory, without a driver.

The programs play the driver's part: a thread with its name maps and fills memory while all others are held.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import structlog

from kybernate_shim.checkpoint import vram_path
from kybernate_shim.checkpoint.image import Image, verify, write_manifest
from kybernate_shim.checkpoint.manifest import File, Host, Manifest, Program, Source, now
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.vram_path import HASTE_BYTES, BytesLost, WayBack, WayOut, hastened
from kybernate_shim.config import Gpu
from kybernate_shim.cuda.vram.client import MODULE, WorkerLost, vram_worker
from kybernate_shim.cuda.vram.errors import DigestMismatch, FileFailed, RegionChanged, VramError
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.memory import Region
from kybernate_shim.linux.ptrace import Held
from tests.fakes.actor import Actor
from tests.fakes.memory_process import MemoryProcess

pytestmark = pytest.mark.root

MIB = 1 << 20
SETTINGS = Gpu(huge_pages="off", threads=2)
HUGE = replace(SETTINGS, huge_pages="process")
LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


@pytest.fixture
def program() -> Iterator[Actor]:
    with Actor() as one:
        yield one


@pytest.fixture(params=["on a disk", "in memory"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "on a disk":
        directory = tmp_path / "image"
        directory.mkdir()
        yield directory
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as shm:
        yield Path(shm)


def run(body: Callable[[Children], Awaitable[None]]) -> None:
    async def main() -> None:
        children = Children()
        children.attach(asyncio.get_running_loop())
        async with asyncio.timeout(60):
            await body(children)

    asyncio.run(main())


@asynccontextmanager
async def out(
    children: Children,
    image: Path,
    checkpoint: Callable[[], object],
    *programs: MemoryProcess,
    settings: Gpu = SETTINGS,
    gone: bool = False,
) -> AsyncIterator[WayOut]:
    """Take what `checkpoint` maps in the programs out, and put it back in the end."""
    way = WayOut(children, settings, LOG)
    async with aclosing(way):
        async with way.watching([program.pid for program in programs], image=image):
            checkpoint()
        async with way.moved_out(image, Operation("checkpoint"), lambda: gone):
            yield way


def maps_and_fills(program: MemoryProcess, name: str = "vram", size: int = 8 * MIB) -> Callable[[], None]:
    def act() -> None:
        program.region(name, size)
        program.fill(name, 0, size)

    return act


def assert_filled(program: MemoryProcess, size: int = 8 * MIB) -> None:
    """The memory of `maps_and_fills` holds what it was filled with."""
    maps_and_fills(program, "same", size)()
    assert program.digest("vram") == program.digest("same")


def place(program: MemoryProcess, name: str = "vram", size: int = 8 * MIB) -> Region:
    start = program.ask(f"where({name!r})")
    return Region(start, start + size, "rw-p", 0, "")


def resident_of_its_own(program: MemoryProcess) -> int:
    """Return the KiB that the program needs for the memory of `maps_and_fills` beside those of the image's files."""
    return program.resident_kib(place(program), "Anonymous")


def workers() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if MODULE in process.cmdline()]


# -- the way out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_bytes_leave_and_come_back(program: Actor, image: Path, threads: int) -> None:
    program.region("own", 4 * MIB)
    program.fill("own", 0, 4 * MIB)

    async def body(children: Children) -> None:
        checkpoint = maps_and_fills(program, size=33 * MIB)
        async with out(children, image, checkpoint, program, settings=replace(SETTINGS, threads=threads)) as way:
            before = program.digest("own")
            assert way.data_path.name == "fast"
            (file,) = way.files
            assert (file.pid, file.size) == (program.pid, 33 * MIB)
            assert [path.name for path in image.iterdir()] == [f"kybernate-vram-{program.pid}-0.bin"]
            assert program.resident_kib(place(program, size=33 * MIB)) == 0
        assert program.digest("own") == before

    run(body)
    assert_filled(program, 33 * MIB)
    assert program.computes()


def test_other_threads_stand_still_while_the_driver_works_and_not_longer(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        def checkpoint() -> None:
            assert program.stands_still()
            maps_and_fills(program)()

        async with out(children, image, checkpoint, program):
            assert program.computes()

    run(body)


def test_several_processes_and_regions_with_holes(image: Path) -> None:
    async def body(children: Children) -> None:
        with Actor() as one, Actor() as two:
            digests: list[str] = []

            def checkpoint() -> None:
                for number, program in enumerate((one, two)):
                    program.region("a", 4 * MIB)
                    program.fill("a", 0, 4 * MIB, seed=number)
                    program.region("big", 64 * MIB)
                    program.fill("big", 20 * MIB, 21 * MIB, seed=number)
                digests.extend(program.digest(name) for program in (one, two) for name in ("a", "big"))

            async with out(children, image, checkpoint, one, two) as way:
                assert {file.pid for file in way.files} == {one.pid, two.pid}
                assert sum(path.stat().st_blocks for path in image.iterdir()) * 512 < 14 * MIB
                assert sum(file.data_bytes for file in way.files) == 10 * MIB
            assert [program.digest(name) for program in (one, two) for name in ("a", "big")] == digests
            assert one.resident_kib(place(one, "big", 64 * MIB)) <= 4 * 1024  # zeros were not written

    run(body)


def test_failure_after_the_drop_puts_the_bytes_back(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async def fail() -> None:
            async with out(children, image, maps_and_fills(program), program):
                assert program.resident_kib(place(program)) == 0
                raise RuntimeError("CRIU failed")

        with pytest.raises(RuntimeError, match="CRIU failed"):
            await fail()

    run(body)
    assert_filled(program)


def test_nobody_is_filled_who_is_gone(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True):
            pass
        assert program.resident_kib(place(program)) == 0

    run(body)


def test_traced_process_goes_the_plain_way(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        with Held(program.pid, spare=lambda name: name.startswith("cuda")):
            way = WayOut(children, SETTINGS, LOG)
            async with aclosing(way), way.watching([program.pid], image=image):
                maps_and_fills(program)()
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                assert (way.data_path.name, way.files) == ("plain", ())
                assert "traces it already" in way.data_path.why
                assert program.resident_kib(place(program)) == 8 * 1024
        assert list(image.iterdir()) == []
        assert workers() == []

    run(body)


def test_setting_plain_starts_no_worker(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        settings = replace(SETTINGS, data_path="plain")
        async with out(children, image, maps_and_fills(program), program, settings=settings) as way:
            assert (way.data_path.name, way.data_path.why) == ("plain", "gpu.data_path")
            assert workers() == []

    run(body)


def test_failed_checkpoint_lets_go_of_the_threads(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = WayOut(children, SETTINGS, LOG)
        with pytest.raises(RuntimeError, match="driver"):
            async with aclosing(way), way.watching([program.pid], image=image):
                raise RuntimeError("the driver failed")

    run(body)
    assert program.computes()


def test_threads_go_on_when_the_driver_takes_too_long(
    program: Actor, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it waits for a lock that one of them holds."""
    monkeypatch.setattr(vram_path, "HOLD_SECONDS", 0.5)

    async def body(children: Children) -> None:
        def checkpoint() -> None:
            assert program.computes()
            maps_and_fills(program)()

        async with out(children, image, checkpoint, program) as way:
            assert (way.data_path.name, way.files) == ("plain", ())
            assert "longer than 0.5 s" in way.data_path.why
            assert program.resident_kib(place(program)) == 8 * 1024

    run(body)


@pytest.mark.parametrize("change", ["maps['vram'].resize(4 << 20)", "maps['vram'].close()"], ids=["shrunk", "unmapped"])
def test_region_that_changes_size_fails_the_checkpoint_alone(program: Actor, image: Path, change: str) -> None:
    async def body(children: Children) -> None:
        way = WayOut(children, SETTINGS, LOG)
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
        way = WayOut(children, SETTINGS, LOG)
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
        way = WayOut(children, SETTINGS, LOG)
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
    monkeypatch.setattr(vram_path, "HOLD_SECONDS", 60.0)  # so much memory takes time to fill
    size = 255 * MIB  # four parts

    async def body(children: Children) -> None:
        way = WayOut(children, SETTINGS, LOG)
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
    """Whether a thread of the program that somebody traces is in a call of madvise, or about to make it."""
    tasks = [
        task for task in Path(f"/proc/{pid}/task").iterdir() if "TracerPid:\t0\n" not in (task / "status").read_text()
    ]
    return any((task / "syscall").read_text().split()[0] in ("28", "running", "233") for task in tasks)


def test_cancelled_save_leaves_the_process_as_it_was(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        way = WayOut(children, SETTINGS, LOG)
        async with aclosing(way):
            async with way.watching([program.pid], image=image):
                maps_and_fills(program, size=128 * MIB)()

            async def move() -> None:
                async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                    await asyncio.sleep(60)

            moving = asyncio.ensure_future(move())
            await asyncio.sleep(0.03)
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
        assert program.resident_kib(place(program, size=128 * MIB)) == 128 * 1024

    run(body)
    assert program.computes()


def test_bytes_that_cannot_be_put_back_are_lost_aloud(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        with pytest.raises(BytesLost, match="does not hold the bytes that were saved"):
            async with out(children, image, maps_and_fills(program), program) as way:
                flip(image / way.files[0].file)

    run(body)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(MIB + 7)
        byte = file.read(1)[0]
        file.seek(MIB + 7)
        file.write(bytes([byte ^ 1]))


# -- the way back ------------------------------------------------------------------------------------------------------


def finished(directory: Path, way: WayOut) -> Image:
    """Make an image of what was moved out."""
    manifest = Manifest(
        id="i",
        time=now(),
        source=Source("c"),
        runtime=Program("runc", "1"),
        criu=Program("criu", "4.2"),
        host=Host("6", "x86_64", (), 2, 4096),
        vram=way.files,
        data_path=way.data_path,
        files=tuple(File(file.file, file.size, file.digest) for file in way.files),
    )
    write_manifest(directory, manifest, durable=False)
    return Image(directory, manifest)


def test_restored_memory_is_filled_and_its_digests_compared(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True) as way:
            made = finished(image, way)
        back, operation = WayBack(children, SETTINGS, LOG), Operation("restore")
        async with back.expecting(made):
            await back.fill(made, {program.pid: program.pid}, operation)
            mapped = resident_of_its_own(program) == 0
            assert mapped == (image.parent == Path("/dev/shm"))
            await back.prove(made)
        assert_filled(program)
        assert [(step.name, step.bytes) for step in operation.steps] == [("vram-load", 8 * MIB)]
        assert verify(image) == []
        assert workers() == []

    run(body)


def test_wrong_byte_is_found_by_the_restore_and_by_verify(program: Actor, image: Path) -> None:
    async def body(children: Children) -> None:
        async with out(children, image, maps_and_fills(program), program, gone=True) as way:
            made = finished(image, way)
        flip(image / way.files[0].file)
        back = WayBack(children, SETTINGS, LOG)
        async with back.expecting(made):

            async def fill_and_prove() -> None:
                await back.fill(made, {program.pid: program.pid}, Operation("restore"))
                await back.prove(made)

            with pytest.raises(DigestMismatch, match="must not run"):
                await fill_and_prove()
        assert [(problem.file, problem.kind) for problem in verify(image)] == [(way.files[0].file, "changed")]
        assert verify(image, vram=False) == []

    run(body)


def test_process_that_keeps_its_bytes_gets_its_memory_from_us(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with hastened(children, HUGE, LOG, [program.pid], HASTE_BYTES):
            assert len(workers()) == 1
            region = program.map_populated("vram", 16 * MIB)
            assert program.computes()
        assert workers() == []
        assert region.private_anonymous
        assert program.resident_kib(region, "AnonHugePages") > 0
        program.fill("vram", 0, 16 * MIB)

    run(body)
    assert program.computes()


def test_without_a_worker_the_driver_makes_its_memory(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with hastened(children, HUGE, LOG, [program.pid], HASTE_BYTES):
            (one,) = workers()
            one.kill()
            region = program.map_populated("vram", 16 * MIB)
            program.fill("vram", 0, 16 * MIB)
        assert program.resident_kib(region) >= 16 * 1024

    run(body)
    assert program.computes()


def test_little_memory_is_not_worth_a_worker(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with hastened(children, HUGE, LOG, [program.pid], HASTE_BYTES - 1):
            assert workers() == []

    run(body)


def test_worker_that_fails_in_an_unforeseen_way_is_lost(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with vram_worker(children) as worker:
            with pytest.raises(WorkerLost, match=r"status 1: .*TypeError"):
                await worker.ask("watch", pid=program.pid)

    run(body)
    assert program.computes()


def test_worker_ends_with_its_shim(program: Actor) -> None:
    async def body(children: Children) -> None:
        async with vram_worker(children) as worker:
            names = {program.pid: program.pid}
            await worker.ask(
                "watch", pids=[program.pid], seconds=60, directory="/nowhere", names=names, threads=2, huge=False
            )
            process = psutil.Process(worker.pid)
            worker._writer.close()
            await asyncio.to_thread(process.wait, 10)

    run(body)
    assert program.computes()

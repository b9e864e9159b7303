"""The driver's own copy as a file of the image: caught while it is mapped, taken away for a dump, given back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import structlog

from kybernate_shim.checkpoint import vram_path
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.vram_path import WayOut
from kybernate_shim.config import Gpu
from kybernate_shim.cuda.vram.client import MODULE
from kybernate_shim.cuda.vram.crew import Transfer
from kybernate_shim.cuda.vram.digest import of_file
from kybernate_shim.cuda.vram.driven import Allowance
from kybernate_shim.cuda.vram.errors import FileFailed, NotTakenAway, RegionChanged
from kybernate_shim.cuda.vram.pool_filling import fill
from kybernate_shim.cuda.vram.saved import mapped_files
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.memory import Region, read_maps
from tests.fakes.actor import Actor, eventually

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE = 8 * MIB
SETTINGS = Gpu(huge_pages="off", threads=2)
LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


@pytest.fixture
def program() -> Iterator[Actor]:
    with Actor() as one:
        yield one


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """A directory in 64 MiB of memory."""
    directory = tmp_path / "image"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # the program may have a file of it mapped


def run(body: Callable[[WayOut], Awaitable[None]], settings: Gpu = SETTINGS) -> None:
    async def main() -> None:
        children = Children()
        children.attach(asyncio.get_running_loop())
        async with asyncio.timeout(60), aclosing(WayOut(children, settings, LOG)) as way:
            await body(way)

    asyncio.run(main())


@asynccontextmanager
async def watched(way: WayOut, program: Actor, image: Path, size: int = SIZE) -> AsyncIterator[None]:
    """Have the program move `size` bytes, as the driver does, and run the body right after, within the watch."""
    async with way.watching([program.pid], image=image, size=size):
        program.region("vram", size)
        program.fill("vram", 0, size)
        yield


def mapping(program: Actor) -> Region:
    start = program.ask("where('vram')")
    return next(one for one in read_maps(program.pid) if one.start <= start < one.end)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def descriptors(program: Actor) -> set[str]:
    return {str(fd.readlink()) for fd in Path(f"/proc/{program.pid}/fd").iterdir()}


def open_image_files(program: Actor, image: Path) -> set[int]:
    """Return the descriptors of files on the image's tmpfs, removed ones among them."""
    device = image.stat().st_dev
    return {int(fd.name) for fd in Path(f"/proc/{program.pid}/fd").iterdir() if fd.stat().st_dev == device}


def worker() -> psutil.Process:
    (one,) = [process for process in psutil.Process().children() if MODULE in process.cmdline()]
    return one


def test_driver_writes_the_image_itself_and_a_dump_finds_empty_memory(program: Actor, image: Path) -> None:
    held = descriptors(program)

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            assert mapping(program).perms == "rw-s"
        content = program.digest("vram")
        assert way.driven == {program.pid: SIZE}
        assert program.computes()
        operation = Operation("checkpoint")
        async with way.moved_out(image, operation, lambda: False):
            (file,) = way.files
            place = mapping(program)
            assert place.private_anonymous
            assert (file.start, file.size, file.data_bytes) == (program.ask("where('vram')"), SIZE, SIZE)
            path = image / file.file
            assert digest(path.read_bytes()) == content
            assert file.digest == of_file(path, Transfer().piece_bytes, Transfer())
            assert program.resident_kib(Region(file.start, file.start + SIZE, "rw-p", 0, "")) == 0
        assert program.digest("vram") == content
        assert mapping(program).private_anonymous
        assert way.data_path.name == "fast"
        assert [(step.name, step.bytes) for step in operation.steps] == [("vram-save", SIZE), ("vram-load", SIZE)]

    run(body)
    assert descriptors(program) == held


def test_zeros_become_holes(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image):
            program.region("vram", SIZE)
            program.fill("vram", 2 * MIB, 4 * MIB)
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (file,) = way.files
            assert file.data_bytes == 2 * MIB
            assert (image / file.file).stat().st_blocks * 512 == 2 * MIB
        assert program.digest("vram") == content

    run(body)


def test_only_the_first_large_mapping_is_the_files(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image):
            program.region("small", MIB)
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            program.region("more", SIZE)
            program.fill("more", 0, SIZE, seed=2)
        content, more = program.digest("vram"), program.digest("more")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert [file.size for file in way.files] == [SIZE, SIZE]
            assert sorted(path.name for path in image.iterdir()) == sorted(file.file for file in way.files)
        assert (program.digest("vram"), program.digest("more")) == (content, more)

    run(body)


def test_without_room_the_driver_gets_its_memory(program: Actor, image: Path) -> None:
    """And the checkpoint fails, for what it would have to copy has no room either."""

    async def body(way: WayOut) -> None:
        async with watched(way, program, image, size=96 * MIB):
            pass
        assert mapping(program).private_anonymous
        assert (way.driven, list(image.iterdir())) == ({}, [])
        content = program.digest("vram")
        with pytest.raises(FileFailed, match="No space left"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert program.digest("vram") == content

    run(body)


def pooled(image: Path, *sizes: int) -> Gpu:
    """Return settings with a pool on the image's tmpfs."""
    directory = image / "pool"
    fill(directory, sizes)
    return replace(SETTINGS, image_pool=directory, image_pool_files=sizes)


@pytest.mark.parametrize("ready", [SIZE - 2 * MIB, SIZE, SIZE + 4 * MIB])
def test_driver_writes_into_memory_of_the_pool(program: Actor, image: Path, ready: int) -> None:
    settings = pooled(image, ready)
    (file,) = image.glob("pool/*")
    inode = file.stat().st_ino

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            assert mapping(program).inode == inode
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (found,) = way.files
            path = image / found.file
            assert (path.stat().st_ino, path.stat().st_size, found.data_bytes) == (inode, SIZE, SIZE)
            assert digest(path.read_bytes()) == content
        assert program.digest("vram") == content

    run(body, settings)
    assert list(image.glob("pool/*")) == []


def test_memory_of_the_pool_that_a_process_has_held_is_not_given_to_another(program: Actor, image: Path) -> None:
    settings = pooled(image, SIZE)

    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            assert open_image_files(program, image)
            program.region("small", MIB)  # too small to be what was expected
        assert way.driven == {}

    run(body, settings)
    assert list(image.rglob("*")) == [image / "pool"]
    assert open_image_files(program, image) == set()


def test_pool_makes_way_for_what_needs_the_room(program: Actor, image: Path) -> None:
    """Of the 64 MiB, 56 are the pool's."""
    size = 60 * MIB
    settings = pooled(image, 28 * MIB, 28 * MIB)

    async def body(way: WayOut) -> None:
        async with watched(way, program, image, size):
            pass
        assert way.driven == {program.pid: size}

    run(body, settings)
    assert list(image.glob("pool/*")) == []


def test_failed_checkpoint_leaves_the_driver_its_bytes(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        with pytest.raises(RuntimeError, match="driver"):
            async with watched(way, program, image):
                raise RuntimeError("the driver failed")
        for file in image.iterdir():
            file.unlink()  # as the whole image is, then
        content = program.digest("vram")
        program.region("same", SIZE)
        program.fill("same", 0, SIZE)
        assert program.digest("same") == content

    run(body)
    assert program.computes()
    assert open_image_files(program, image) == set()


@pytest.mark.parametrize("change", ["maps['vram'].resize(4 << 20)", "maps['vram'].close()"], ids=["shrunk", "unmapped"])
def test_mapping_that_has_changed_fails_the_checkpoint_alone(program: Actor, image: Path, change: str) -> None:
    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            pass
        program.ask(change)
        with pytest.raises(RegionChanged):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_worker_that_is_killed_while_the_driver_works_costs_the_fast_way(program: Actor, image: Path) -> None:
    """The driver has its mapping by then; the process gets memory of its own, which CRIU can dump."""

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            worker().kill()
            content = program.digest("vram")
        assert way.data_path.name == "plain"
        assert "ended with" in way.data_path.why
        assert open_image_files(program, image) == set()
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content
            assert list(image.iterdir()) == []

    run(body)
    assert program.computes()


def test_worker_that_is_killed_before_the_driver_works_leaves_nothing(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image):
            one = worker()
            one.kill()
            assert await asyncio.to_thread(eventually, lambda: not one.is_running())
            program.region("vram", SIZE)
        assert way.data_path.name == "plain"
        assert (open_image_files(program, image), list(image.iterdir())) == (set(), [])
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous

    run(body)
    assert program.computes()


def test_mapping_that_has_changed_without_a_worker_fails_the_checkpoint_alone(program: Actor, image: Path) -> None:
    """Nothing was taken from the process: that its own memory is another now is no loss of ours."""

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            worker().kill()
        program.ask("maps['vram'].close()")
        with pytest.raises(NotTakenAway, match="changed what its driver had mapped"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")

    run(body)
    assert program.computes()


def test_driver_that_takes_too_long_costs_the_fast_way(
    program: Actor, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is complete when the driver is done, although nobody watches any more."""
    monkeypatch.setattr(vram_path, "HOLD_SECONDS", 0.5)

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            assert mapping(program).perms == "rw-s"
            assert eventually(program.computes)
            program.fill("vram", MIB, 2 * MIB, seed=3)
            content = program.digest("vram")
        assert "took longer" in way.data_path.why
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content
            assert list(image.iterdir()) == []

    run(body)
    assert open_image_files(program, image) == set()


def test_cancelled_watch_leaves_nothing(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async def watch() -> None:
            async with way.watching([program.pid], image=image):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(watch())
        assert await asyncio.to_thread(eventually, lambda: bool(open_image_files(program, image)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (open_image_files(program, image), list(image.iterdir())) == (set(), [])

    run(body)
    assert program.computes()


def test_child_of_the_process_has_nothing_of_it(program: Actor, image: Path) -> None:
    """A dump of the child would look for the file, and a restore, too."""

    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            pass
        start = program.ask("where('vram')")
        child = program.ask("os.fork() or signal.pause()")
        try:
            assert any(one.start <= start < one.end for one in read_maps(program.pid))
            assert not any(one.start <= start < one.end for one in read_maps(child))
        finally:
            os.kill(child, signal.SIGKILL)

    run(body)


def test_file_of_the_same_number_on_another_filesystem_is_not_taken_for_it(
    program: Actor, image: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", other], check=True)
    try:
        for directory in (image, other):
            (directory / "kybernate-vram-1-0.bin").write_bytes(bytes(SIZE))
        assert len({(one / "kybernate-vram-1-0.bin").stat().st_ino for one in (image, other)}) == 1
        path = str(other / "kybernate-vram-1-0.bin")
        program.ask(f"maps.update(vram=mmap.mmap(os.open({path!r}, os.O_RDWR), 0))")
        assert mapping(program).perms == "rw-s"
        assert mapped_files([program.pid], image) == {}
        assert mapped_files([program.pid], other).keys() == {program.pid}
    finally:
        subprocess.run(["umount", "--lazy", other], check=True)


def test_worker_that_is_killed_before_it_takes_away_costs_the_fast_way(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            pass
        content = program.digest("vram")
        worker().kill()
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert (way.data_path.name, way.files) == ("plain", ())
            assert mapping(program).private_anonymous
            assert program.digest("vram") == content

    run(body)


def test_process_that_is_killed_is_named(program: Actor, image: Path) -> None:
    async def body(way: WayOut) -> None:
        async with watched(way, program, image):
            pass
        os.kill(program.pid, signal.SIGKILL)
        assert eventually(lambda: not read_maps(program.pid))
        with pytest.raises(Exception, match=r"has ended"):
            await way.moved_out(image, Operation("checkpoint"), lambda: False).__aenter__()
        assert list(image.iterdir()) == []

    run(body)


# -- A process that keeps more than it was lent ------------------------------------------------------------------------

KEEP = {  # how the thread that pretends to be the driver's keeps the file that it finds among its descriptors
    "descriptor": "kept.append(os.dup(lent()))",
    "descriptor-to-read": "kept.append(os.open(f'/proc/self/fd/{lent()}', os.O_RDONLY))",
    "mapping": "kept.append(mmap.mmap(lent(), 0))",
    "in-a-socket": "(kept.extend(socket.socketpair()), socket.send_fds(kept[0], [b'x'], [lent()]))",
}
LENT = (
    "globals().update(kept=[], socket=__import__('socket'), path='/proc/self/fd/{{}}'.format,"
    "lent=lambda: next(n for n in range(3, 99) if os.path.exists(path(n)) and os.stat(path(n)).st_dev == {device}))"
)


def keep(program: Actor, image: Path, how: str) -> None:
    program.ask(f"str({LENT.format(device=image.stat().st_dev)})")
    assert program.ask(f"str({how})") is not None


@pytest.mark.parametrize("how", KEEP.values(), ids=KEEP)
def test_file_that_the_process_has_kept_is_not_the_images(program: Actor, image: Path, how: str) -> None:
    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            keep(program, image, how)
            inode = mapping(program).inode
        content = program.digest("vram")
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            (file,) = way.files
            path = image / file.file
            assert list(image.iterdir()) == [path]
            assert path.stat().st_ino != inode
            assert (way.data_path.name, way.data_path.why) == ("fast", vram_path.COPIED)
            assert digest(path.read_bytes()) == content
            assert file.digest == of_file(path, Transfer().piece_bytes, Transfer())
            assert used_bytes(image) <= SIZE + 2 * MIB  # what was kept has no memory any more
        assert program.digest("vram") == content

    run(body)


def test_path_that_the_process_has_kept_leads_to_no_writing(program: Actor, image: Path) -> None:
    """A descriptor of O_PATH counts as none; root could make another one of it, for writing."""

    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image, size=SIZE):
            program.region("vram", SIZE)
            program.fill("vram", 0, SIZE)
            keep(program, image, "kept.append(os.open(f'/proc/self/fd/{lent()}', os.O_PATH))")
            assert program.ask("os.close(os.open(f'/proc/self/fd/{kept[0]}', os.O_RDWR))") is None
        async with way.moved_out(image, Operation("checkpoint"), lambda: False):
            assert way.data_path.why == vram_path.BY_THE_DRIVER
            with pytest.raises(OSError, match="Read-only"):
                os.open(f"/proc/{program.pid}/fd/{program.ask('kept[0]')}", os.O_RDWR)

    run(body)


def test_pages_of_a_file_that_was_kept_but_not_taken_are_given_back(program: Actor, image: Path) -> None:
    settings = pooled(image, SIZE)

    async def body(way: WayOut) -> None:
        assert used_bytes(image) >= SIZE
        async with way.watching([program.pid], image=image, size=SIZE):
            keep(program, image, KEEP["descriptor"])
        assert used_bytes(image) < MIB

    run(body, settings)


def test_copy_without_room_leaves_the_process_its_bytes(program: Actor, image: Path) -> None:
    size = 40 * MIB

    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image, size=size):
            program.region("vram", size)
            program.fill("vram", 0, size)
            keep(program, image, KEEP["descriptor"])
        content = program.digest("vram")
        with pytest.raises(FileFailed, match="No space left"):
            async with way.moved_out(image, Operation("checkpoint"), lambda: False):
                raise AssertionError("it was moved out")
        assert mapping(program).private_anonymous
        assert program.digest("vram") == content
        assert list(image.iterdir()) == []
        assert used_bytes(image) < MIB

    run(body)


def test_more_than_the_driver_holds_is_not_taken_from_the_image(program: Actor, image: Path) -> None:
    """What a thread asks for that only has a name like the driver's; the driver is still served after it."""
    held = 16 * MIB
    most = held + held // Allowance.MARGIN_SHARE + Allowance.MARGIN_BYTES

    subprocess.run(["mount", "-o", "remount,size=2g", image], check=True)

    async def body(way: WayOut) -> None:
        async with way.watching([program.pid], image=image, size=held):
            program.region("greed", most + MIB)
            assert used_bytes(image) < MIB
            program.region("vram", held)
            program.fill("vram", 0, held)
            assert mapping(program).perms == "rw-s"
        assert way.driven == {program.pid: held}

    run(body)


def used_bytes(image: Path) -> int:
    space = os.statvfs(image)
    return (space.f_blocks - space.f_bfree) * space.f_frsize

"""The data path where the kernel gets in its way: frozen cgroups of both versions, tmpfs that is full or made huge."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, hierarchy_mounts
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import TargetUnresponsive
from kybernate_shim.vram_io import errors, files
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import load, map_in
from kybernate_shim.vram_mover.save import save
from tests.fakes.memory_process import MemoryProcess, drop_pages

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE = 8 * MIB
FREEZERS = {1: "freezer", 2: UNIFIED}
VERSIONS = [version for version, name in FREEZERS.items() if name in hierarchy_mounts(read_mountinfo())]


@pytest.fixture
def target() -> Iterator[MemoryProcess]:
    with MemoryProcess() as process:
        yield process


@pytest.fixture(params=VERSIONS, ids=lambda version: f"v{version}")
def cgroup(request: pytest.FixtureRequest, target: MemoryProcess) -> Iterator[Cgroup]:
    """A cgroup with the target in it."""
    name = FREEZERS[request.param]
    directory = hierarchy_mounts(read_mountinfo())[name][0].path / f"kybernate-vram-{os.getpid()}"
    directory.mkdir()
    cgroup = Cgroup(request.param, {name: directory})
    cgroup.join(target.pid)
    yield cgroup
    cgroup.thaw()
    target.kill()
    deadline = time.monotonic() + 10
    while cgroup.processes():
        assert time.monotonic() < deadline, f"{cgroup.processes()} are still in {directory}"
        time.sleep(0.005)
    directory.rmdir()


def test_frozen_target_is_read_and_written_but_not_dropped(
    target: MemoryProcess, cgroup: Cgroup, tmp_path: Path
) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before = target.digest("a")
    cgroup.freeze()
    saved = save(target.pid, [region], tmp_path, ["v"])
    with pytest.raises(TargetUnresponsive, match="did not stop in time"):
        drop_pages(target.pid, region.start, region.size, seconds=0.2)
    assert target.resident_kib(region) == SIZE // 1024
    load(target.pid, saved, tmp_path, huge_pages=False, target_is_zero=False)
    cgroup.thaw()
    assert target.digest("a") == before
    assert "TracerPid:\t0\n" in Path(f"/proc/{target.pid}/status").read_text()


def test_frozen_threads_that_were_all_told_to_stop_go_on_after_the_thaw(target: MemoryProcess, cgroup: Cgroup) -> None:
    """Only a freezer of version 2 lets them do that."""
    for _ in range(3):
        target.ask("threading.Thread(target=lambda: time.sleep(60), daemon=True).start()")
    cgroup.freeze()
    refused = pytest.raises(TargetUnresponsive) if cgroup.version == 1 else nullcontext()
    with refused, SeizedProcess(target.pid, spare=lambda name: False, seconds=0.2):
        pass
    cgroup.thaw()
    assert target.ask("1 + 1") == 2
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{target.pid}/task").iterdir()]
    assert all("TracerPid:\t0\n" in status for status in statuses)
    assert not any("State:\tt" in status for status in statuses)


def test_target_frozen_while_held_goes_on_unharmed_after_the_thaw(target: MemoryProcess, cgroup: Cgroup) -> None:
    """Where an interrupt does not reach a frozen thread, the tracing thread stays until the thaw."""
    target.tell("[1, time.sleep(0.01), 2]")
    with SeizedProcess(target.pid, seconds=0.2) as held:
        freezing = threading.Thread(target=cgroup.freeze)
        freezing.start()
        freezing.join()
        with pytest.raises(TargetUnresponsive):
            held.madvise(1 << 40, 4096, 4)
    cgroup.thaw()
    assert target.answer() == [1, None, 2]
    with SeizedProcess(target.pid) as held:
        assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
    assert target.ask("1 + 1") == 2


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs with the options that the test gives."""
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "none", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("mounted", ["size=4m"], indirect=True)
@pytest.mark.parametrize("threads", [1, 4, files.MANY_THREADS])
def test_full_tmpfs_fails_the_save_and_is_left_empty(target: MemoryProcess, mounted: Path, threads: int) -> None:
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    before = target.digest("a")
    with pytest.raises(errors.FileFailed, match="v cannot be written: No space left on device"):
        save(target.pid, [region], mounted, ["v"], CopyOptions(threads=threads, piece_bytes=MIB))
    assert not list(mounted.iterdir())
    assert target.digest("a") == before


@pytest.mark.parametrize("mounted", ["size=64m", "size=64m,huge=always"], indirect=True)
@pytest.mark.parametrize("direct", [None, True])
@pytest.mark.parametrize("threads", [4, files.MANY_THREADS])
def test_tmpfs_of_small_and_huge_pages_keeps_the_bytes(
    target: MemoryProcess, mounted: Path, direct: bool | None, threads: int
) -> None:
    region = target.region("a", 3 * SIZE + 4096)
    target.fill("a", SIZE, 2 * SIZE + 99)
    before = target.digest("a")
    how = CopyOptions(threads=threads, piece_bytes=MIB, direct=direct)
    saved = save(target.pid, [region], mounted, ["v"], how)
    target.drop(saved)
    assert target.resident_kib(region) == 0
    load(target.pid, saved, mounted, how)
    assert target.digest("a") == before


@pytest.mark.parametrize("mounted", ["size=64m"], indirect=True)
def test_restored_process_cannot_write_to_the_image(target: MemoryProcess, mounted: Path) -> None:
    """Its memory is the image's file, and root in a container is the owner of that."""
    region = target.region("a", SIZE)
    target.fill("a", 0, SIZE)
    content = target.digest("a")
    saved = save(target.pid, [region], mounted, ["v"])
    target.drop(saved)
    assert map_in(target.pid, saved, mounted) == saved
    assert target.digest("a") == content
    mapped = Path(f"/proc/{target.pid}/map_files/{region.start:x}-{region.end:x}")
    assert os.path.samestat(mapped.stat(), (mounted / "v").stat())
    with pytest.raises(OSError, match="Read-only"):
        mapped.open("r+b")
    target.fill("a", 0, SIZE, seed=2)
    assert hashlib.blake2b((mounted / "v").read_bytes()).hexdigest() == content

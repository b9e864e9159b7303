"""A suspended container whose VRAM is parked on the disk: its processes stay, and a resume brings all of it back."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from kybernate_shim.arena.memory import ArenaOwner, Memory
from kybernate_shim.checkpoint.image.verification import verify
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate, refused, small_disk
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arena import MIB, SIZE, WANTED, in_arena

ROOT = Path("/var/lib/kybernate/parked")
LARGE = gpu.command(mib=48, pause_ms=50)


def files() -> list[Path]:
    return [path for path in ROOT.rglob("*") if path.is_file()]


def bytes_of(ctr: Ctr, id: str) -> bytes:
    """Return what the arena has of a container's first process."""
    memory = Memory(SIZE)
    kept = memory.kept(ArenaOwner.of(ctr.pid(id)))
    with memory.file.open("rb") as arena:
        return b"".join(
            os.pread(arena.fileno(), extent.size, extent.start)
            for one in kept
            for extent in one.extents
            if not extent.is_hole
        )


def test_parked_container_takes_no_host_memory_and_comes_back(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        for _ in range(3):
            kybernate("suspend", container.id)
            plain = bytes_of(ctr, container.id)
            assert "parked" in kybernate("park", container.id)
            assert Memory(SIZE).free() == SIZE
            (file,) = files()
            written = file.read_bytes()
            assert len(written) == MIB << 20
            blocks = {plain[at : at + 4096] for at in range(0, len(plain), 4096)} - {bytes(4096)}
            assert blocks
            assert not any(block in written for block in blocks)  # encrypted
            assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
            container.stands_still()
            (seen,) = [one for one in json.loads(kybernate("ps", "-o", "json")) if one["container"] == container.id]
            assert (seen["gpu"], seen["parked_bytes"]) == ("suspended", MIB << 20)
            assert "running, parked" in kybernate("ps")
            kybernate("park", container.id)  # it is: nothing is to be done
            assert files() == [file]
            steps = [step["name"] for step in json.loads(kybernate("resume", container.id, "--json"))["steps"]]
            assert steps[0] == "unpark"
            assert not files()
            container.computes_on()


def test_several_processes_are_parked_together(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(2, mib=MIB), programs=2, flags=WANTED) as container:
        kybernate("suspend", container.id)
        kybernate("park", container.id)
        assert len(files()) >= 2
        kybernate("wake", container.id)
        container.computes_on()


def test_room_of_a_parked_container_is_another_ones(ctr: Ctr, gpus: Gpus) -> None:
    """Three of 48 MiB in an arena of 128: the third fits when one is parked, which comes back when there is room."""
    with (
        gpu.computing(ctr, *LARGE, flags=WANTED) as one,
        gpu.computing(ctr, *LARGE, flags=WANTED) as two,
        gpu.computing(ctr, *LARGE, flags=WANTED) as three,
    ):
        kybernate("suspend", one.id)
        kybernate("suspend", two.id)
        kybernate("park", one.id)
        assert "arena-take" in kybernate("suspend", three.id, "--json")
        said = refused("kybernate", "resume", one.id)
        assert "do not fit into the arena" in said
        assert "stays parked" in said
        one.stands_still()
        assert files()
        kybernate("resume", three.id)
        three.computes_on()
        kybernate("resume", one.id)
        one.computes_on()
        kybernate("resume", two.id)
        two.computes_on()


def test_swap_brings_a_parked_container_in(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *LARGE, flags=WANTED) as one, gpu.computing(ctr, *LARGE, flags=WANTED) as two:
        kybernate("suspend", two.id)
        kybernate("park", two.id)
        kybernate("swap", one.id, two.id)
        one.stands_still()
        two.computes_on()
        kybernate("resume", one.id)
        one.computes_on()


def test_checkpoint_has_what_is_parked(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        kybernate("park", container.id)
        kybernate("checkpoint", container.id, str(tmp_path / "image"))
        assert not verify(tmp_path / "image")
        container.stands_still()  # it stays suspended, in host memory
        assert not files()
        assert in_arena(ctr, container.id) == MIB << 20
        kybernate("resume", container.id)
        container.computes_on()


def test_helper_that_is_killed_meanwhile_changes_nothing(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        kybernate("park", container.id)
        gpu.kill_helpers()
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()


def test_file_that_was_changed_is_never_computed_with(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        kybernate("park", container.id)
        (file,) = files()
        with file.open("r+b") as stream:
            before = os.pread(stream.fileno(), 1, MIB << 19)
            os.pwrite(stream.fileno(), bytes([before[0] ^ 1]), MIB << 19)
            said = refused("kybernate", "resume", container.id)
            assert "does not hold the bytes" in said
            assert "stays parked" in said
            container.stands_still()
            assert Memory(SIZE).free() == SIZE
            os.pwrite(stream.fileno(), before, MIB << 19)
        kybernate("resume", container.id)
        container.computes_on()


@pytest.mark.parametrize("when", [0.0, 0.05, 0.15, 0.3])
def test_mover_that_is_killed_leaves_the_bytes_in_one_place(ctr: Ctr, gpus: Gpus, when: float) -> None:
    with gpu.computing(ctr, *gpu.command(mib=48, pause_ms=50), flags=WANTED) as container:
        kybernate("suspend", container.id)
        for command in ("park", "resume"):
            timer = threading.Timer(when, _kill_movers)
            timer.start()
            with gpu.begun("kybernate", command, container.id) as first:
                first.wait(60)
            timer.join()
            if command == "park" or not _computes(container):
                kybernate(command, container.id)
        container.computes_on()
        assert not files()


def _computes(container: gpu.Computing) -> bool:
    return "running, " not in kybernate("status", container.id)


def _kill_movers() -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"kybernate_shim.vram_mover.worker" in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            pass


def test_container_that_ends_while_it_is_parked_leaves_nothing(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        kybernate("park", container.id)
        assert files()
    eventually(lambda: not files())
    assert Memory(SIZE).free() == SIZE


def test_container_without_bytes_in_the_arena_is_refused(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as container:
        assert "only what is suspended can be parked" in refused("kybernate", "park", container.id)
        kybernate("suspend", container.id)
        said = refused("kybernate", "park", container.id)
        assert "has no VRAM in the arena" in said
        kybernate("resume", container.id)
        container.computes_on()


def test_directory_in_memory_is_refused(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        kybernate("suspend", container.id)
        with small_disk(ROOT, 64) as disk:
            assert "written to by other users" in refused("kybernate", "park", container.id)
            disk.chmod(0o700)
            assert "is in memory" in refused("kybernate", "park", container.id)
        kybernate("resume", container.id)
        container.computes_on()

"""Parked containers on a node that loses what it can lose: movers, daemons, processes, room, files, settings."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import PROMPTLY, kybernate, refused, shim_of
from tests.system.ctr import Ctr, eventually, run
from tests.system.gpu.arena import MIB, SIZE, WANTED
from tests.system.gpu.node import CONFIG, lives
from tests.system.named import cancel

ROOT = Path("/var/lib/kybernate/parked")
ONE = gpu.command(mib=MIB)


def left(root: Path = ROOT) -> list[Path]:
    return list(root.rglob("*")) if root.exists() else []


def parked(container: gpu.Computing) -> None:
    kybernate("suspend", container.id)
    kybernate("park", container.id)


def others(ctr: Ctr, container: gpu.Computing) -> list[psutil.Process]:
    """Return the processes of a container but for its init."""
    return [psutil.Process(pid) for pid in container.pids() if pid != ctr.pid(container.id)]


def comes_back(container: gpu.Computing) -> None:
    container.stands_still()
    kybernate("resume", container.id)
    container.computes_on()
    assert not left()


@contextmanager
def in_the_middle(*argv: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Run a command whose VRAM mover is stopped as soon as it is there, until it is told to continue, or the end."""
    over = threading.Event()
    found: list[psutil.Process] = []

    def look() -> None:
        while not found and not over.is_set():
            for one in psutil.process_iter(["cmdline"]):
                if "kybernate_shim.vram_mover.worker" in (one.info["cmdline"] or []):
                    with suppress(psutil.Error):
                        one.suspend()
                        found.append(one)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with gpu.begun("kybernate", *argv) as command:
            eventually(lambda: found)
            yield command, found[0]
            with suppress(psutil.Error):
                found[0].resume()
            command.wait(30)
    finally:
        over.set()
        thread.join()


@contextmanager
def settings(text: str) -> Iterator[None]:
    before = CONFIG.read_text()
    CONFIG.write_text(text)
    try:
        yield
    finally:
        CONFIG.write_text(before)


@contextmanager
def full_soon(at: Path, mib: int) -> Iterator[Path]:
    """Have a small disk at a directory, and return where a file takes its room; it is not a tmpfs by its name."""
    base = Path("/run/small-disk")
    base.mkdir()
    run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(base)])
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    at.mkdir(exist_ok=True)
    where = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    run(["mount", "-t", "overlay", "overlay", "-o", where, str(at)])
    try:
        yield base / "filling"
    finally:
        for mounted in (at, base):
            eventually(lambda: run(["umount", str(mounted)]) == "")  # noqa: B023  # asked immediately
        base.rmdir()


@pytest.mark.parametrize("verb", ["park", "resume"])
def test_cancel_leaves_the_bytes_where_they_were(ctr: Ctr, gpus: Gpus, verb: str) -> None:
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        kybernate("suspend", container.id)
        if verb == "resume":
            kybernate("park", container.id)
        before = len(left())
        open_files = shim_of(ctr, container.id).num_fds()
        with in_the_middle(verb, container.id) as (command, mover):
            threading.Timer(0.2, mover.resume).start()
            cancel(ctr, container.id)
            assert command.wait(PROMPTLY)
        assert len(left()) == before
        assert shim_of(ctr, container.id).num_fds() <= open_files
        comes_back(container)


@pytest.mark.parametrize("verb", ["park", "resume"])
def test_killed_container_does_not_wait_for_the_disk(ctr: Ctr, gpus: Gpus, verb: str) -> None:
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        kybernate("suspend", container.id)
        if verb == "resume":
            kybernate("park", container.id)
        with in_the_middle(verb, container.id) as (command, mover):
            threading.Timer(0.2, mover.resume).start()
            run(["ctr", "-n", ctr.namespace, "task", "kill", "-s", "KILL", container.id])
            assert command.wait(PROMPTLY)
            assert "was killed" in command.communicate()[1]
    assert not left()
    assert Memory(SIZE).free() == SIZE


def test_killed_daemon_leaves_no_files(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        parked(container)
        shim_of(ctr, container.id).kill()
        eventually(lambda: ctr.status(container.id) == "")
        eventually(lambda: not left())


def test_resume_of_a_process_that_has_ended_leaves_no_files(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, "sh", "-c", f"{' '.join(ONE)} & exec sleep 1000", flags=WANTED) as container:
        parked(container)
        (program,) = others(ctr, container)
        program.kill()
        eventually(lambda: not lives(program))
        assert "no process" in refused("kybernate", "resume", container.id)
        assert not left()


def test_disk_that_is_full_halfway_changes_nothing(ctr: Ctr, gpus: Gpus) -> None:
    with (
        gpu.computing(ctr, *gpu.command(mib=48, pause_ms=50), flags=WANTED) as container,
        full_soon(ROOT, 130) as filling,
    ):
        kybernate("suspend", container.id)
        with in_the_middle("park", container.id) as (command, mover):
            eventually(left)
            subprocess.run(["dd", "if=/dev/zero", f"of={filling}", "bs=1M"], capture_output=True, check=False)
            mover.resume()
            said = command.communicate()[1]
        assert "No space left on device" in said
        assert "stays suspended" in said
        assert not left()
        filling.unlink()
        kybernate("park", container.id)
        comes_back(container)


def test_files_that_are_gone_or_cut_are_never_computed_with(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        parked(container)
        (file,) = [path for path in left() if path.is_file()]
        content = file.read_bytes()
        os.truncate(file, len(content) // 2)
        assert "stays parked" in refused("kybernate", "resume", container.id)
        os.truncate(file, len(content))
        assert "does not hold the bytes" in refused("kybernate", "resume", container.id)
        file.unlink()
        assert "No such file" in refused("kybernate", "resume", container.id)
        assert Memory(SIZE).free() == SIZE
        container.stands_still()
        file.write_bytes(content)
        comes_back(container)


def test_disk_that_does_not_answer_has_a_deadline(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        parked(container)
        with (
            settings(f"{CONFIG.read_text()}[deadlines]\nrestore = 1\n"),
            in_the_middle("resume", container.id) as (command, mover),
        ):
            threading.Timer(2, mover.resume).start()
            assert command.wait(10)
            assert "longer than 1 s" in command.communicate()[1]
        comes_back(container)


def test_settings_that_change_meanwhile_keep_what_is_parked(ctr: Ctr, gpus: Gpus) -> None:
    place = Path("/var/lib/kybernate/other")
    own = place / "of another program"
    own.mkdir(parents=True)
    with gpu.computing(ctr, *ONE, flags=WANTED) as one, gpu.computing(ctr, *ONE, flags=WANTED) as two:
        parked(one)
        with settings("[gpu]\narena = 0\n"):
            assert "do not fit into the arena" in refused("kybernate", "resume", one.id)
        with settings(f'parking_root = "{place}"\n{CONFIG.read_text()}'):
            place.chmod(0o777)
            kybernate("suspend", two.id)
            assert "can be written to by other users" in refused("kybernate", "park", two.id)
            place.chmod(0o700)
            kybernate("park", two.id)
            assert len(left(place)) == 3
        comes_back(one)
        comes_back(two)
    assert left(place) == [own]
    own.rmdir()
    place.rmdir()


def test_process_of_an_exec_is_parked_with_the_others(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with gpu.computing(ctr, *ONE, flags=WANTED) as container:
        parked(container)
        with log.open("wb") as stream, subprocess.Popen(ctr.exec_argv(container.id, *ONE), stdout=stream) as began:
            before, other = container.steps(), gpu.Computing(container.id, log)
            eventually(other.steps)
            assert container.steps() == before
            parked(container)
            assert Memory(SIZE).free() == SIZE
            other.stands_still()
            comes_back(container)
            other.computes_on()
            (program,) = others(ctr, container)
            program.kill()
            began.wait(10)

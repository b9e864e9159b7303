"""Forked children of a CUDA process, as data loaders have them, hold device files that CRIU refuses to dump."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_no_image, assert_whole, kybernate
from tests.system.ctr import Ctr, eventually, finished
from tests.system.gpu.devices import flags

PROGRAM = ["python3", f"{gpu.INSIDE}/forks.py"]
EPOCHS = ["python3", f"{gpu.INSIDE}/epochs.py", "4"]
EVADES = ["python3", f"{gpu.INSIDE}/evades.py"]
MOMENTS = 8
# Children that are hard to take the device files from, and how their checkpoint is refused.
REFUSED = {
    "shares_memory": "keeps running",  # the pretended driver takes it for a process with CUDA state
    "vforked": "keeps running",
    "shares_descriptors": "it shares memory or descriptors with python3[",
    "waits_in_vfork": "did not stop in time: it is frozen or in the kernel. End the process",
    "traced": "traces it already). End the process",
}
# A process outside the container that has been given the very files of the CUDA process, and has them under the same
# numbers and mapped. When it is told to continue, it says that it still has all of them.
GIVEN = """
import mmap, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("ready", flush=True)
    connection = server.accept()[0]
with connection:
    numbers, given, _, _ = socket.recv_fds(connection, 1024, 16)
numbers = [int(number) for number in numbers.split()]
above = [os.dup2(fd, 200 + at) for at, fd in enumerate(given)]
for fd, number in zip(above, numbers):
    os.dup2(fd, number)
mapped = [mmap.mmap(number, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) for number in numbers]
print(*numbers, flush=True)
sys.stdin.readline()
for number, fd, one in zip(numbers, above, mapped):
    assert os.path.sameopenfile(number, fd) and os.fstat(number).st_rdev
    one[0]
print("all", flush=True)
"""


@pytest.fixture
def ctr(node: Gpus) -> Iterator[Ctr]:
    yield Ctr()
    gpu.heal(node)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


def try_to_checkpoint(id: str, image: Path) -> str:
    """Checkpoint a container that continues; return what was said if that was refused, "" if there is an image."""
    done = finished(["kybernate", "checkpoint", id, str(image)], timeout=120)
    if done.returncode == 0:
        return ""
    said = done.stderr.decode()
    assert "continues as before" in said or "keeps running" in said
    return said


def assert_let_go(container: gpu.Computing, *, stopped: int = 0) -> None:
    """No process of the container is traced by one outside, and so many are stopped."""
    pids, states = container.pids(), []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            states.append(status["State"][0])
            assert int(status["TracerPid"]) in (0, *pids), status
    assert (states.count("T"), states.count("t")) == (stopped, 0), states


def test_forked_children_go_on_through_every_checkpoint(ctr: Ctr, devices: list[str], image: Path) -> None:
    log, second = image.parent / "log", image.parent / "second"
    with gpu.computing(ctr, *PROGRAM, log=log, flags=flags(devices)) as container:
        kybernate("suspend", container.id)
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()
        kybernate("checkpoint", container.id, str(image.parent / "first"))
        container.computes_on()
        released = assert_whole(image.parent / "first").released
        assert len(released) == 4, released  # two workers and the pool's two; none of the others has inherited
        assert {(one.mappings, one.descriptors, one.kept_bytes) for one in released} == {(2, 2, 64 << 10)}
        assert "that released inherited GPU device files" in kybernate("inspect", str(image.parent / "first"))
        kybernate("checkpoint", container.id, str(image), "--exit")
        document = json.loads(kybernate("inspect", str(image), "--json"))
        assert "released" not in json.loads((image / "kybernate-manifest.json").read_text())
        assert document["manifest"]["released"] == []
    with gpu.computing_again(ctr, image, log, flags=flags(devices)) as again:
        again.computes_on()
        kybernate("checkpoint", again.id, str(second), "--exit")
    with gpu.computing_again(ctr, second, log, flags=flags(devices)) as again:
        again.computes_on()


def test_workers_of_each_epoch_meet_checkpoints_at_any_moment(ctr: Ctr, devices: list[str], image: Path) -> None:
    log, met = image.parent / "log", 0
    with gpu.computing(ctr, *EPOCHS, log=log, flags=flags(devices)) as container:
        for moment in range(MOMENTS):
            place = image.parent / str(moment)
            if try_to_checkpoint(container.id, place):
                assert_no_image(place)
            else:  # a worker that has released something may have ended before all were frozen
                met += any(step.name == "release" for step in assert_whole(place).steps)
            container.computes_on()
            assert_let_go(container)
        assert met, "no checkpoint has met a worker"
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, flags=flags(devices)) as again:
        again.computes_on()
        kybernate("suspend", again.id)
        kybernate("resume", again.id)
        again.computes_on()


@pytest.mark.parametrize("child", REFUSED)
def test_child_that_keeps_the_files_is_named_and_left_alone(
    ctr: Ctr, devices: list[str], image: Path, child: str
) -> None:
    with gpu.computing(ctr, *EVADES, child, log=image.parent / "log", flags=flags(devices)) as container:
        said = try_to_checkpoint(container.id, image)
        assert REFUSED[child] in said
        assert_no_image(image)
        container.computes_on()
        assert_let_go(container)


def test_stopped_child_stays_stopped(ctr: Ctr, devices: list[str], image: Path) -> None:
    with gpu.computing(ctr, *EVADES, "stopped", log=image.parent / "log", flags=flags(devices)) as container:
        said = try_to_checkpoint(container.id, image)
        if hierarchy_version() == 1:
            assert "has been stopped by a signal for" in said
            assert_no_image(image)
        else:
            assert not said
        container.computes_on()
        assert_let_go(container, stopped=1)


def test_child_that_flees_by_forking_locks_nothing(ctr: Ctr, devices: list[str], image: Path) -> None:
    with gpu.computing(ctr, *EVADES, "flees", log=image.parent / "log", flags=flags(devices)) as container:
        if try_to_checkpoint(container.id, image):
            assert_no_image(image)
        else:
            assert_whole(image)
        container.computes_on()
        assert_let_go(container)


def test_generations_that_are_forked_while_it_is_suspended_are_in_the_image(
    ctr: Ctr, devices: list[str], image: Path
) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, *EVADES, "forks_late", log=log, flags=flags(devices)) as container:
        kybernate("suspend", container.id)
        (child,) = set(container.pids()) - {ctr.pid(container.id)}
        os.kill(child, signal.SIGUSR1)
        eventually(lambda: len(container.pids()) == 4)
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert len(assert_whole(image).released) == 3
    with gpu.computing_again(ctr, image, log, flags=flags(devices)) as again:
        again.computes_on()


def test_process_outside_keeps_the_files_that_it_was_given(ctr: Ctr, devices: list[str], image: Path) -> None:
    path = gpu.GPUS / "given.sock"
    words = [sys.executable, "-c", GIVEN, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        assert outside.stdout.readline() == "ready\n"
        program = [*EVADES, "gives_away", str(path)]
        with gpu.computing(ctr, *program, log=image.parent / "log", flags=flags(devices)) as container:
            assert len(outside.stdout.readline().split()) == len(devices)
            kybernate("checkpoint", container.id, str(image))
            assert len(assert_whole(image).released) == 1
            container.computes_on()
        assert outside.communicate("go on\n")[0] == "all\n"
    path.unlink()

"""Forked children of a CUDA process, as data loaders have them, hold device files that CRIU refuses to dump."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.system import gpu
from tests.system.checkpoints import assert_no_image, assert_whole, kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.children import EVADES, assert_let_go, ctr, image, try_to_checkpoint  # noqa: F401
from tests.system.gpu.devices import flags

PROGRAM = ["python3", f"{gpu.INSIDE}/forks.py"]
EPOCHS = ["python3", f"{gpu.INSIDE}/epochs.py", "4"]
MOMENTS, MOST_MOMENTS = 8, 60  # at least, and until one has met a worker
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
        for moment in range(MOST_MOMENTS):
            if met and moment >= MOMENTS:
                break
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
        path.chmod(0o777)  # the program that connects to it is no root's
        program = [*EVADES, "gives_away", str(path)]
        with gpu.computing(ctr, *program, log=image.parent / "log", flags=flags(devices)) as container:
            assert len(outside.stdout.readline().split()) == len(devices)
            kybernate("checkpoint", container.id, str(image))
            assert len(assert_whole(image).released) == 1
            container.computes_on()
        assert outside.communicate("go on\n")[0] == "all\n"
    path.unlink()

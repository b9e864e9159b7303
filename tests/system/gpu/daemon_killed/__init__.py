"""A daemon is killed at each step of an operation on GPU state: its container ends, or the report on the node frees it.

On pretended GPUs, with the arena. An operation is held where a call of the driver is about to be made, or the OCI
runtime is about to dump or has dumped; then the daemon is killed, and what was held continues without it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.fakes.cuda import Gpus
from tests.lab.node import Containerd
from tests.system import gpu
from tests.system.checkpoints import MANIFEST, kybernate
from tests.system.checkpoints import shim_of as daemon_of
from tests.system.ctr import Ctr, eventually
from tests.system.gpu import toolkit

SIZE = 64 << 20
PIECES = 3
# ctr removes its FIFOs with the task, and here containerd does that.
WANTED = ["--annotation", "kybernate.io/arena=true", "--null-io"]
PLACE = Path("/tmp/held")  # of the runtime: `before` and `after` say where it is to wait
# In the place of NVIDIA's, by whose name it is known. It waits as another program, which can be killed as runc can.
HELD = Path("/tmp/held-runtime/nvidia-container-runtime")
RUNTIME = f"""
case " $* " in *" checkpoint "*) ;; *) exec {toolkit.RUNTIME} "$@";; esac
wait_at() {{ [ ! -e {PLACE}/$1 ] || {{ echo $$ > {PLACE}/reached; exec sleep 1000; }} }}
wait_at before
runc "$@" || exit
wait_at after
"""


@dataclass(frozen=True)
class Moment:
    """When a daemon dies: in `command`, at a call of the driver (VERB:N), or "before" or "after" a dump.

    `away`: of a container that is suspended. `lost`: a part of its memory is in an unfinished image then.
    """

    command: str
    at: str
    away: bool = False
    lost: bool = False
    data_path: str = "fast"

    def __str__(self) -> str:
        return f"{self.command}, {self.at}{', plain' if self.data_path == 'plain' else ''}"


IN_DRIVER = [
    Moment("suspend", "lock:1"),
    Moment("suspend", "unlock:1"),  # by the arena, which has stopped the threads before
    Moment("suspend", "lock:2"),
    Moment("suspend", "checkpoint:1"),
    Moment("resume", "restore:1", away=True),
    Moment("resume", "unlock:1", away=True),  # by the arena, again
    Moment("resume", "unlock:2", away=True),
    *(Moment(command, at) for command in ("checkpoint", "checkpoint --exit") for at in ("lock:1", "checkpoint:1")),
    Moment("checkpoint", "restore:1"),
    Moment("checkpoint", "unlock:2"),  # by the arena, which has done the first, too
    Moment("checkpoint", "unlock:3"),
]
IN_DUMP = [
    moment
    for command in ("checkpoint", "checkpoint --exit")
    for at in ("before", "after")
    for moment in (Moment(command, at, lost=True), Moment(command, at, data_path="plain"))
]


def with_and_without_helper(moments: Sequence[Moment]) -> pytest.MarkDecorator:
    """Have a test run at each moment, and where the helper is killed as well.

    The helper's own death ends a process whose threads the arena has stopped, which is for another test.
    """
    stopped = {("suspend", "unlock:1"), ("resume", "unlock:1"), ("suspend", "lock:2"), ("checkpoint", "unlock:2")}
    both = [pytest.param(moment, True, id=str(moment)) for moment in moments]
    alone = [moment for moment in moments if (moment.command, moment.at) not in stopped]
    both += [pytest.param(moment, False, id=f"{moment}, and the helper") for moment in alone]
    return pytest.mark.parametrize(("moment", "helper"), both)


def configure(runtime: Path, data_path: str) -> None:
    new = gpu.CONFIG.with_suffix(".new")
    arena = f'arena = {{ 0 = "{SIZE >> 20}MiB" }}'
    new.write_text(f'runtime = "{runtime}"\n[gpu]\n{arena}\ndata_path = "{data_path}"\n')
    new.rename(gpu.CONFIG)


@contextmanager
def held(gpus: Gpus, container: gpu.Holding, moment: Moment, image: Path) -> Iterator[None]:
    """Have the operation come to its moment, and continue from there after the block."""
    if moment.away:
        kybernate("suspend", container.id)
    verb, _, number = moment.at.partition(":")
    reached = PLACE / "reached"
    if number:
        gpus.record()
        gpus.switch(f"{moment.at}:hold")
    else:
        (PLACE / moment.at).touch()
    words = moment.command.split()
    where = [str(image)] if words[0] == "checkpoint" else []
    with gpu.begun("kybernate", words[0], container.id, *where, *words[1:]):
        if number:
            calls = gpus.directory / "calls"
            eventually(lambda: calls.read_text().count(f" {verb} ") >= int(number))
        else:
            eventually(lambda: reached.exists() and reached.read_text().endswith("\n"))
        try:
            yield
        finally:
            if number:
                gpus.recorded()
                gpus.switch("")
            else:
                os.kill(int(reached.read_text()), signal.SIGKILL)
                (PLACE / moment.at).unlink()
                reached.unlink()


def gpu_states(*flags: str) -> list[tuple[str, str]]:
    """Return what the report on the node says of GPU states: nothing where none is left behind."""
    found = json.loads(kybernate("doctor", "--json", *flags, status=None))
    return [(one["verdict"], one["found"]) for one in found if one["subject"] == "GPU state"]


def kill_daemon(ctr: Ctr, gpus: Gpus, image: Path, moment: Moment) -> None:
    """Kill the daemon of a container at a moment; containerd ends the container, and nothing is left of it."""
    configure(HELD, moment.data_path)
    with gpu.holding(ctr, PIECES, WANTED) as container:
        pid = ctr.pid(container.id)
        with held(gpus, container, moment, image):
            daemon_of(ctr, container.id).kill()
        eventually(lambda: not psutil.pid_exists(pid), seconds=60)  # the arena may have to start another worker first
        eventually(lambda: ctr.status(container.id) == "")
        assert container.id not in {one["container"] for one in json.loads(kybernate("ps", "--json"))}
        assert gpu_states() == []
        assert not (image / MANIFEST).exists()


def kill_daemon_and_containerd(
    ctr: Ctr, gpus: Gpus, image: Path, containerd: Containerd, moment: Moment, *, helper: bool
) -> None:
    """Kill the daemon where containerd does not see it: the report on the node frees what is left.

    `helper`: it lives on.
    """
    configure(HELD, moment.data_path)
    with gpu.holding(ctr, PIECES, WANTED) as container:
        pid, daemon = ctr.pid(container.id), daemon_of(ctr, container.id)
        with held(gpus, container, moment, image):
            containerd.kill()
            daemon.kill()
            if not helper:
                gpu.kill_helpers()
        try:
            told = gpu_states()
            assert all(verdict == "bad" and container.id in words for verdict, words in told), told
            assert all(verdict == "ok" for verdict, _ in gpu_states("--fix"))
            if moment.lost:
                assert "a part of its memory" in told[0][1]
                eventually(lambda: not psutil.pid_exists(pid))
            else:
                assert container.is_right()
            assert gpu_states() == []
        finally:
            containerd.start()
            containerd.wait_ready()
        eventually(lambda: ctr.status(container.id) == "")
        assert not psutil.pid_exists(pid)

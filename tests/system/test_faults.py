"""What breaks on a node, and what must hold afterwards: containers run on or are gone, and nothing is left over."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.ctr import CommandFailed, Ctr, Events, eventually, run
from tests.system.leftovers import Snapshot

SHIM_CONFIG = Path("/etc/kybernate/shim.toml")


@pytest.fixture
def containerd() -> Containerd:
    return Containerd()


@pytest.fixture
def ours() -> Ctr:
    return Ctr()


@pytest.fixture
def shim_config() -> Iterator[Path]:
    """A configuration file that is removed again."""
    SHIM_CONFIG.parent.mkdir(parents=True, exist_ok=True)
    yield SHIM_CONFIG
    SHIM_CONFIG.unlink(missing_ok=True)


def shim_of(ctr: Ctr, id: str) -> psutil.Process:
    """Return the daemon of a container: the parent of its init."""
    parent = psutil.Process(ctr.pid(id)).parent()
    assert parent is not None
    return parent


# -- containerd ---------------------------------------------------------------------------------------------------------


def test_containers_are_found_again_after_containerd_was_killed(ours: Ctr, containerd: Containerd) -> None:
    out = Path(f"/tmp/{ours.new_id('log')}")
    count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
    with ours.running("sh", "-c", count, flags=["--log-uri", f"file://{out}"]) as id:
        eventually(lambda: len(out.read_text().split()) > 3)
        pid = ours.pid(id)
        containerd.kill(signal.SIGKILL)
        seen = len(out.read_text().split())
        eventually(lambda: len(out.read_text().split()) > seen + 5)
        containerd.start()
        assert ours.tasks()[id] == (pid, "RUNNING")
        assert ours.exec(id, "echo", "back") == "back\n"
        lines = out.read_text().split()
        assert lines == [str(number) for number in range(1, len(lines) + 1)]
    out.unlink()


def test_exit_while_containerd_is_away_is_told_when_it_is_back(ours: Ctr, containerd: Containerd) -> None:
    id = ours.new_id()
    run(ours.run_argv(id, "sleep", "1000", flags=["-d"]))
    pid = ours.pid(id)
    containerd.kill(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    containerd.start()
    # A stopped task has no processes, and containerd removes such tasks when it starts.
    eventually(lambda: ours.status(id) in ("STOPPED", ""))
    ours.remove(id)


def test_events_of_an_absence_arrive_in_order(ours: Ctr, containerd: Containerd) -> None:
    with ours.running("sh", "-c", "trap 'exit 3' TERM; while :; do sleep 0.1; done") as keeper, ours.running("sleep", "1000"):
        with Events() as stream:
            containerd.kill(signal.SIGSTOP)
            subprocess.run(["kill", "-TERM", str(psutil.Process(_init_of(keeper)).pid)], check=True)
            time.sleep(0.5)
            containerd.kill(signal.SIGCONT)
            eventually(lambda: stream.topics(keeper) == ["exit"])
            assert stream.of(keeper)[0][1]["exit_status"] == 3


def _init_of(id: str) -> int:
    return int(next(Path("/run/containerd/io.containerd.runtime.v2.task/default").glob(f"{id}/init.pid")).read_text())


def test_pods_survive_a_containerd_restart(containerd: Containerd) -> None:
    cri = Cri()
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"])
        cri.await_log(pod, "c", "3")
        containerd.kill(signal.SIGKILL)
        containerd.start()
        eventually(lambda: cri.state(id) == "RUNNING", seconds=40)
        last = cri.log(pod, "c")[-1]
        cri.await_log(pod, "c", str(int(last) + 3))
        assert cri.exec(id, "echo", "back") == (0, "back\n")
        lines = cri.log(pod, "c")
        assert lines == [str(number) for number in range(1, len(lines) + 1)]
    cri.close()


# -- the daemon -----------------------------------------------------------------------------------------------------


def test_killed_daemon_takes_its_container_along_and_containerd_reports_it(ours: Ctr, events: Events) -> None:
    id = ours.new_id()
    run(ours.run_argv(id, "sleep", "1000", flags=["-d"]))
    pid = ours.pid(id)
    shim_of(ours, id).kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: {"exit", "delete"} <= set(events.topics(id)))
    assert next(event for topic, event in events.of(id) if topic == "/tasks/exit")["exit_status"] == 137
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)


def test_killed_daemon_of_a_paused_container_leaves_nothing_frozen(ours: Ctr) -> None:
    id = ours.new_id()
    run(ours.run_argv(id, "sleep", "1000", flags=["-d"]))
    pid = ours.pid(id)
    ours("task", "pause", id)
    shim_of(ours, id).kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)


def test_killed_daemon_of_a_pod_ends_all_its_containers() -> None:
    cri = Cri()
    before = Snapshot.take()
    with cri.pod() as pod:
        ids = [cri.run(pod, name, ["sleep", "1000"]) for name in ("one", "two")]
        for name in Snapshot.take().shims - before.shims:
            os.kill(int(name.partition("[")[2].rstrip("]")), signal.SIGKILL)
        eventually(lambda: all(cri.state(id) == "EXITED" for id in ids), seconds=30)
    cri.close()


def test_terminated_daemon_ends_in_order(ours: Ctr) -> None:
    id = ours.new_id()
    run(ours.run_argv(id, "sleep", "1000", flags=["-d"]))
    shim = shim_of(ours, id)
    shim.terminate()
    eventually(lambda: not shim.is_running() or shim.status() == psutil.STATUS_ZOMBIE)
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)


# -- the runtime ----------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_missing_runtime_is_named_with_where_it_was_looked_for(ours: Ctr, shim_config: Path) -> None:
    shim_config.write_text('runtime = "no-such-runtime"\n')
    with pytest.raises(CommandFailed, match=r"no-such-runtime.*shim\.toml"):
        ours.run("true")


def test_failing_runtime_is_quoted(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    fails = script(tmp_path / "fails", 'echo "the disk is on fire" >&2; exit 3')
    shim_config.write_text(f'runtime = "{fails}"\n')
    with pytest.raises(CommandFailed, match="the disk is on fire"):
        ours.run("true")


def test_hanging_runtime_is_ended_at_its_deadline(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    hangs = script(tmp_path / "hangs", 'case "$*" in *create*) sleep 1000;; *) exec runc "$@";; esac')
    shim_config.write_text(f'runtime = "{hangs}"\n[deadlines]\ncreate = 1\n')
    with pytest.raises(CommandFailed, match=r"create.*1 s|1 s.*create"):
        ours.run("true")


def test_runtime_that_fails_at_start_leaves_a_deletable_task(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    fails = script(tmp_path / "fails", 'case "$*" in *" start "*) echo "no start today" >&2; exit 1;; *) exec runc "$@";; esac')
    shim_config.write_text(f'runtime = "{fails}"\n')
    with pytest.raises(CommandFailed, match="no start today"):
        ours.run("true")


def test_full_disk_at_create_is_reported(ours: Ctr) -> None:
    """The bundle's filesystem has no room for the shim's own files."""
    state = Path("/run/containerd/io.containerd.runtime.v2.task")
    state.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(state)])
    filler = state / "filler"
    try:
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                os.write(file.fileno(), b"x" * 4096)
        os.truncate(filler, filler.stat().st_size - 3 * 4096)  # enough for containerd's own config.json
        with pytest.raises(CommandFailed, match="(?i)no space left"):
            ours.run("true")
    finally:
        filler.unlink(missing_ok=True)
        eventually(lambda: run(["umount", str(state)]) == "")


# -- many -----------------------------------------------------------------------------------------------------------


def test_three_hundred_containers_leave_their_daemon_as_it_was(ours: Ctr) -> None:
    """All of them share the daemon of one group, as the containers of a pod do."""
    group = ["--annotation", f"io.containerd.runc.v2.group={ours.new_id('group')}"]
    before = Snapshot.take()
    with ours.running("sleep", "1000", flags=group) as id:
        shim = shim_of(ours, id)
        for _ in range(20):
            ours.run("true", flags=group)
        fds, memory = shim.num_fds(), shim.memory_full_info().uss
        for number in range(280):
            assert ours.run("echo", str(number), flags=group) == f"{number}\n"
        assert len(Snapshot.take().shims - before.shims) == 1
        eventually(lambda: shim.num_fds() == fds)
        assert shim.memory_full_info().uss < memory + (1 << 20)

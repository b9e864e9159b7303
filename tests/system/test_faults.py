"""What breaks around a daemon, and what holds afterwards: containers run on or are gone, and nothing is left over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.ctr import BUNDLES, CommandFailed, Ctr, Events, catches, eventually, run
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.programs import script

COUNT = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
NO_FIFOS = ["--null-io"]  # ctr removes its FIFOs with the task; containerd, which removes it here, knows none of them


def counted(lines: list[str]) -> bool:
    """Tell whether nothing is missing and nothing came twice."""
    return lines == [str(number) for number in range(1, len(lines) + 1)]


# -- containerd ----------------------------------------------------------------------------------------------------


def test_containers_are_found_again_after_containerd_was_killed(
    ours: Ctr, containerd: Containerd, tmp_path: Path
) -> None:
    out = tmp_path / "log"
    with ours.running("sh", "-c", COUNT, flags=["--log-uri", f"file://{out}"]) as id:
        eventually(lambda: out.exists() and len(out.read_text().split()) > 3)
        pid = ours.pid(id)
        containerd.kill()
        seen = len(out.read_text().split())
        eventually(lambda: len(out.read_text().split()) > seen + 5)
        containerd.restart()
        assert ours.tasks()[id] == (pid, "RUNNING")
        assert ours.exec(id, "echo", "back") == "back\n"
        ours("task", "pause", id)
        assert counted(out.read_text().split())


def test_exit_while_containerd_is_away_is_known_when_it_is_back(ours: Ctr, containerd: Containerd) -> None:
    id = ours.launch("sleep", "1000", flags=NO_FIFOS)
    pid = ours.pid(id)
    containerd.kill()
    os.kill(pid, signal.SIGKILL)
    containerd.restart()
    # A task without processes is removed when containerd starts: it may be gone already, but never looks alive.
    eventually(lambda: ours.status(id) in ("STOPPED", ""))
    ours.remove(id)


def test_events_of_an_absence_arrive_in_order(ours: Ctr, containerd: Containerd, tmp_path: Path) -> None:
    """Three execs end while containerd is away; the container itself lives, so containerd finds the task again."""
    flags = ["-d", "--log-uri", f"file://{tmp_path}/log"]
    with ours.running("sleep", "1000") as id:
        for name in ("e1", "e2", "e3"):
            ours("task", "exec", *flags, "--exec-id", name, id, "sleep", "1000")
        pids = [int((BUNDLES / ours.namespace / id / f"{name}.pid").read_text()) for name in ("e1", "e2", "e3")]
        containerd.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        time.sleep(6.5)  # the shim's pauses between tries grow: now the next try comes only once a process listens
        containerd.restart()
        with Events() as stream:
            eventually(lambda: stream.topics(id) == ["exit"] * 3)
            assert [event["id"] for _, event in stream.of(id)] == ["e1", "e2", "e3"]
            assert {event["exit_status"] for _, event in stream.of(id)} == {137}


def test_events_wait_for_a_containerd_that_hangs(ours: Ctr, containerd: Containerd) -> None:
    with ours.running("sh", "-c", "trap 'exit 3' TERM; while :; do sleep 0.1; done") as id, Events() as stream:
        pid = ours.pid(id)
        eventually(lambda: catches(pid, signal.SIGTERM))
        os.kill(containerd.pid, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: not Path(f"/proc/{pid}").exists())
        finally:
            os.kill(containerd.pid, signal.SIGCONT)
        eventually(lambda: stream.topics(id) == ["exit"])
        assert stream.of(id)[0][1]["exit_status"] == 3


def test_pods_survive_a_containerd_restart(containerd: Containerd) -> None:
    cri = Cri()
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sh", "-c", COUNT])
        cri.await_log(pod, "c", "3")
        containerd.restart()
        assert cri.state(id) == "CONTAINER_RUNNING"
        last = cri.log(pod, "c")[-1]
        cri.await_log(pod, "c", str(int(last) + 3))
        assert cri.exec(id, "echo", "back") == (0, "back\n")
        assert counted(cri.log(pod, "c"))
    cri.close()


# -- the runtime ----------------------------------------------------------------------------------------------------


def test_missing_runtime_is_named_with_where_it_was_looked_for(ours: Ctr, shim_config: Path) -> None:
    shim_config.write_text('runtime = "no-such-runtime"\n')
    with pytest.raises(CommandFailed, match=r'"no-such-runtime"') as failed:
        ours.run("true")
    assert "/etc/kybernate/shim.toml" in str(failed.value)
    assert "/usr/local/sbin" in str(failed.value)


def test_wrong_configuration_is_quoted_with_its_key(ours: Ctr, shim_config: Path) -> None:
    shim_config.write_text("[deadlines]\ncreate = -1\n")
    with pytest.raises(CommandFailed, match=r"shim\.toml.*deadlines\.create"):
        ours.run("true")


def test_failing_runtime_is_quoted(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    fails = script(tmp_path / "fails", 'echo "the disk is on fire" >&2; exit 3')
    shim_config.write_text(f'runtime = "{fails}"\n')
    with pytest.raises(CommandFailed, match="the disk is on fire"):
        ours.run("true")


def test_hanging_runtime_is_ended_at_its_deadline(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    hangs = script(tmp_path / "hangs", 'case "$*" in *create*) sleep 1000;; *) exec runc "$@";; esac')
    shim_config.write_text(f'runtime = "{hangs}"\n[deadlines]\ncreate = 1\n')
    with pytest.raises(CommandFailed, match=r"create failed: .*did not end within 1 s"):
        ours.run("true")


def test_runtime_that_fails_at_start_leaves_a_deletable_task(ours: Ctr, shim_config: Path, tmp_path: Path) -> None:
    fails = script(
        tmp_path / "fails", 'case "$*" in *" start "*) echo "no start today" >&2; exit 1;; *) exec runc "$@";; esac'
    )
    shim_config.write_text(f'runtime = "{fails}"\n')
    id = ours.new_id()
    with pytest.raises(CommandFailed, match="no start today"):
        run(ours.run_argv(id, "true", flags=["-d"]))
    assert ours.status(id) == "CREATED"
    ours.remove(id)


# -- the disk -------------------------------------------------------------------------------------------------------


@contextmanager
def disk_with_room_for(pages: int) -> Iterator[None]:
    """Put bundles on a disk of their own, full but for so many pages."""
    run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=711", "tmpfs", str(BUNDLES)])
    filler = BUNDLES / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        os.truncate(filler, filler.stat().st_size - pages * 4096)
        yield
        assert [path.name for path in BUNDLES.glob("*/*")] == []
    finally:
        run(["umount", "--lazy", str(BUNDLES)])  # a daemon that containerd has forgotten holds it until it gives up


def test_full_disk_at_create_is_reported(ours: Ctr) -> None:
    """With every page more, the disk is full one step later: in containerd, in the shim, in the runtime.

    A daemon that containerd itself could not take note of ends on its own, after some time.
    """
    before, refusals = Snapshot.take(), []
    for pages in range(1, 40):
        with disk_with_room_for(pages):
            try:
                assert ours.run("echo", "room") == "room\n"
                break
            except CommandFailed as failed:
                refusals.append(str(failed).lower())
    assert len(refusals) >= 4
    assert [refusal for refusal in refusals if "no space left" not in refusal] == []
    assert_nothing_left(before, seconds=60)

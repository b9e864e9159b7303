"""The daemon as a process of the node: who may talk to it, what it holds, how it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from kybernate_shim.address import socket_path
from tests.lab.node import LOGS, Containerd
from tests.system.checkpoints import ended, shim_of
from tests.system.cri import Cri
from tests.system.ctr import BUNDLES, Ctr, Events, eventually
from tests.system.leftovers import Snapshot

NO_FIFOS = ["--null-io"]  # ctr removes its FIFOs with the task; containerd, which removes it here, knows none of them


# -- what others see of it ------------------------------------------------------------------------------------------


def test_socket_is_for_root_alone_and_at_containerds_address(ours: Ctr) -> None:
    with ours.running("sleep", "1000") as id:
        path = socket_path(str(Containerd().socket), ours.namespace, id)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
        assert path.stat().st_uid == 0


def test_every_container_and_every_pod_has_a_daemon_and_a_socket_of_its_own(ours: Ctr) -> None:
    before = Snapshot.take()
    cri = Cri()
    with ours.running("sleep", "1000") as one, ours.running("sleep", "1000") as two, cri.pod() as pod:
        cri.run(pod, "c", ["sleep", "1000"])
        later = Snapshot.take()
        assert len(later.sockets - before.sockets) == 3
        assert len(later.shims - before.shims) == 3
        assert shim_of(ours, one) != shim_of(ours, two)
        for id in (one, two):
            mounted = Path(f"/proc/{ours.pid(id)}/root/run")
            assert not any(path.is_socket() for path in mounted.rglob("*")), "the container sees a shim's socket"
    cri.close()


def test_socket_answers_nobody_but_root(ours: Ctr) -> None:
    """The mode keeps others out; a peer that got hold of the address anyway is turned away by its credentials."""
    with ours.running("sleep", "1000") as id:
        path = socket_path(str(Containerd().socket), ours.namespace, id)
        code = f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        tried = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
        assert "PermissionError" in tried.stderr


def test_daemon_holds_nothing_of_its_caller(ours: Ctr) -> None:
    with ours.running("sleep", "1000") as id:
        shim = shim_of(ours, id)
        assert shim.cwd() == "/"
        assert os.getsid(shim.pid) == shim.pid
        assert {str(Path(f"/proc/{shim.pid}/fd/{fd}").readlink()) for fd in (0, 1, 2)} == {"/dev/null"}


def test_daemon_is_killed_for_memory_a_little_sooner_than_containerd(ours: Ctr) -> None:
    with ours.running("sleep", "1000") as id:
        containerd = int(Path(f"/proc/{Containerd().pid}/oom_score_adj").read_text())
        score = int(Path(f"/proc/{shim_of(ours, id).pid}/oom_score_adj").read_text())
        assert score == min(containerd + 1, 1000)


def test_sigusr1_makes_the_daemon_tell_what_it_does(ours: Ctr) -> None:
    with ours.running("sleep", "1000") as id:
        shim = shim_of(ours, id)
        shim.send_signal(signal.SIGUSR1)

        def told() -> bool:
            lines = (LOGS / "containerd.log").read_text(errors="replace").splitlines()
            shown = [json.loads(line) for line in lines if "shim.stack_dumped" in line and line.startswith("{")]
            return any(line["shim_pid"] == shim.pid and "Daemon" in line["stack"] for line in shown)

        eventually(told)
        assert ours.exec(id, "echo", "alive") == "alive\n"


def test_log_of_each_daemon_ends_with_its_end(ours: Ctr) -> None:
    """containerd stops reading it with the answer to Shutdown."""
    log = LOGS / "containerd.log"
    begin = log.stat().st_size
    for _ in range(20):
        ours.run("true")

    def of(event: str) -> list[int]:
        text = log.read_bytes()[begin:].decode(errors="replace")
        lines = [json.loads(line) for line in text.splitlines() if f'"{event}"' in line and line.startswith("{")]
        return sorted(line["shim_pid"] for line in lines)

    eventually(lambda: len(of("shim.started")) == 20)
    eventually(lambda: of("shim.ended") == of("shim.started"))


# -- how it ends ----------------------------------------------------------------------------------------------------


def test_killed_daemon_takes_its_container_along_and_containerd_reports_it(ours: Ctr, events: Events) -> None:
    id = ours.launch("sleep", "1000", flags=NO_FIFOS)
    pid = ours.pid(id)
    shim_of(ours, id).kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: {"exit", "delete"} <= set(events.topics(id)))
    assert next(event for topic, event in events.of(id) if topic == "/tasks/exit")["exit_status"] == 137
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)


def test_killed_daemon_of_a_paused_container_leaves_nothing_frozen(ours: Ctr) -> None:
    id = ours.launch("sleep", "1000", flags=NO_FIFOS)
    pid = ours.pid(id)
    ours("task", "pause", id)
    shim_of(ours, id).kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)


def test_id_can_be_used_again_after_its_daemon_was_killed(ours: Ctr) -> None:
    id = ours.launch("sleep", "1000", flags=NO_FIFOS)
    shim_of(ours, id).kill()
    eventually(lambda: not (BUNDLES / ours.namespace / id).exists())
    ours("container", "rm", id)
    with ours.running("sleep", "1000", id=id):
        assert ours.exec(id, "echo", "again") == "again\n"


@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart of containerd"])
def test_killed_daemon_of_a_pod_ends_all_its_containers(containerd: Containerd, restarted: bool) -> None:
    """Their processes, too: containerd 2 calls no `delete` for those that it has connected to the daemon by itself."""
    cri = Cri(handler="kybernate-path")
    before = Snapshot.take()
    with cri.pod() as pod:
        ids = [cri.run(pod, name, ["sleep", "1000"]) for name in ("one", "two")]
        pids = [Ctr(namespace="k8s.io").pid(id) for id in ids]
        if restarted:
            containerd.restart()
        for name in Snapshot.take().shims - before.shims:
            os.kill(int(name.partition("[")[2].rstrip("]")), signal.SIGKILL)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=30)
        eventually(lambda: all(cri.state(id) == "CONTAINER_EXITED" for id in ids), seconds=30)
    cri.close()


def test_terminated_daemon_ends_in_order(ours: Ctr) -> None:
    id = ours.launch("sleep", "1000", flags=NO_FIFOS)
    shim = shim_of(ours, id)
    shim.terminate()
    eventually(lambda: ended(shim))
    eventually(lambda: ours.status(id) == "")
    ours("container", "rm", id)

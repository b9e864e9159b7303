"""The fork server on a node: its daemons are those that a `start` by itself would leave, and nothing depends on it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kybernate_shim.linux.sealed_program import NUMBER
from tests.lab.containerd_config import SHIM
from tests.lab.node import Containerd
from tests.system.checkpoints import ended, shim_of
from tests.system.ctr import Ctr, eventually, run
from tests.system.leftovers import Snapshot

NAME = "kybernate-fork"
SOCKETS = Path("/run/kybernate/fork-server")
PACKAGE = Path(sysconfig.get_path("purelib")) / "kybernate_shim"  # the installed one, not the checkout's
UNWANTED_SECONDS = 45.0  # how long a daemon waits for its first container


def servers() -> list[psutil.Process]:
    """Return the fork servers; what one has forked to be its successor, or for the next client, is no other one."""
    named = [process for process in psutil.process_iter(["name", "ppid"]) if process.info["name"] == NAME]
    pids = {process.pid for process in named}
    return [process for process in named if process.info["ppid"] not in pids and not ended(process)]


def server() -> psutil.Process:
    """Return the node's only fork server."""
    (only,) = eventually(lambda: found if len(found := servers()) == 1 else [])
    return only


def end_servers(number: int = signal.SIGKILL) -> None:
    """Signal every process that could answer a client."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == NAME:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.fixture
def cold() -> None:
    """A node on which nothing was started yet."""
    end_servers()
    eventually(lambda: not servers())


@pytest.fixture
def warm(cold: None, ours: Ctr) -> psutil.Process:
    """A node whose fork server, started by the containerd that runs now, has settled."""
    ours.run("true")
    eventually(settled, seconds=60)
    return server()


def settled() -> bool:
    """Tell whether the server has only the process for its next client; before, it has a successor, with a session."""
    try:
        sessions = [os.getsid(child.pid) == child.pid for child in server().children() if child.name() == NAME]
        return sessions == [False]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False  # it was just replaced, or its child was taken by a client


# -- what it forks ---------------------------------------------------------------------------------------------------


def nature(process: psutil.Process) -> dict[str, object]:
    """Return what a process has from those that it comes from."""
    proc = Path(f"/proc/{process.pid}")
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    kept = ("Umask", "Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "SigBlk", "Cpus_allowed")
    return {
        "cgroup": (proc / "cgroup").read_text(),
        "limits": (proc / "limits").read_text(),
        "oom_score_adj": (proc / "oom_score_adj").read_text(),
        "nice": process.nice(),
        "leads its session": os.getsid(process.pid) == process.pid,
        "words": process.cmdline()[-8:],
        **{name: status[name] for name in kept},
    }


def forked(process: psutil.Process) -> bool:
    """Tell whether a daemon comes from a fork server: one that does not shows the interpreter in its command line."""
    return process.cmdline()[0] == "containerd-shim-kybernate-v1"


def test_daemon_is_the_same_with_and_without_it(ours: Ctr, warm: psutil.Process, shim_config: Path) -> None:
    with ours.running("sleep", "1000", id="same") as id:
        assert forked(shim_of(ours, id))
        with_it = nature(shim_of(ours, id))
    end_servers()
    shim_config.write_text("fork_server_idle = 0\n")
    with ours.running("sleep", "1000", id="same") as id:
        assert not forked(shim_of(ours, id))
        without = nature(shim_of(ours, id))
    assert servers() == []
    assert with_it == without


@contextmanager
def start(*, before: Callable[[], None]) -> Iterator[psutil.Process]:
    """Start a daemon as containerd does, with `before` done in the process that becomes `start`; end it afterwards."""
    with tempfile.TemporaryDirectory() as bundle, Path(bundle, "error").open("w+") as errors:
        Path(bundle, "config.json").write_text("{}")
        id = f"s{random.getrandbits(32):x}"
        said = subprocess.run(
            start_argv(id), cwd=bundle, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            preexec_fn=before, check=False, text=True,
        ).stdout  # fmt: skip
        errors.seek(0)
        assert said.startswith("{"), errors.read()
        (daemon,) = (it for it in psutil.process_iter(["name", "cmdline"]) if is_daemon(it, id))
        yield daemon
        daemon.terminate()
        eventually(lambda: ended(daemon))


def is_daemon(process: psutil.Process, id: str) -> bool:
    return process.info["name"] == "kybernate-shim" and id in process.info["cmdline"]


def start_argv(id: str) -> list[str]:
    address = str(Containerd().socket)
    return [SHIM, "-namespace", "default", "-address", address, "-publish-binary", "containerd", "-id", id, "start"]


def test_daemon_is_where_its_client_is(warm: psutil.Process) -> None:
    """In every hierarchy of cgroups, with its limits and its priority."""
    roots = [path for path in Path("/sys/fs/cgroup").iterdir() if (path / "cgroup.procs").exists()]
    if Path("/sys/fs/cgroup/cgroup.procs").exists():
        roots = [Path("/sys/fs/cgroup")]
    places = [root / "elsewhere" for root in roots if "cpuset" not in root.name]
    for place in places:
        place.mkdir()

    def enter() -> None:
        for place in places:
            (place / "cgroup.procs").write_text(str(os.getpid()))
        os.nice(3)

    try:
        with start(before=enter) as daemon:
            names = Path(f"/proc/{daemon.pid}/cgroup").read_text().split()
            assert forked(daemon)
            assert len([name for name in names if name.endswith("/elsewhere")]) >= len(places)
            assert daemon.nice() == os.nice(0) + 3
        assert "/elsewhere" not in Path(f"/proc/{warm.pid}/cgroup").read_text()
    finally:
        for place in places:
            eventually(lambda place=place: place.rmdir() or True)


def test_runtime_is_executed_from_the_servers_memory(ours: Ctr, warm: psutil.Process) -> None:
    executed = set()
    with ThreadPoolExecutor(1) as pool:
        starts = pool.submit(lambda: [ours.run("true") for _ in range(10)])
        while not starts.done():
            for process in psutil.process_iter(["name"]):
                if process.info["name"] == "runc":
                    with suppress(OSError):
                        executed.add(Path(f"/proc/{process.pid}/exe").stat().st_ino)
    starts.result()
    assert Path(f"/proc/{warm.pid}/fd/{NUMBER}").stat().st_ino in executed


def test_client_in_a_namespace_of_its_own_does_its_work_itself(warm: psutil.Process) -> None:
    with start(before=lambda: os.unshare(os.CLONE_NEWUTS)) as daemon:
        assert not forked(daemon)
        assert Path(f"/proc/{daemon.pid}/ns/uts").readlink() != Path("/proc/self/ns/uts").readlink()


def test_socket_is_for_root_alone(warm: psutil.Process) -> None:
    (path,) = SOCKETS.iterdir()
    connect = f"socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({str(path)!r})"
    code = f"import os, socket; os.setuid(65534); {connect}"
    tried = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=False)
    assert "PermissionError" in tried.stderr


# -- faults ----------------------------------------------------------------------------------------------------------


def test_killed_between_two_starts(ours: Ctr, warm: psutil.Process) -> None:
    with ours.running("sleep", "1000") as id:
        end_servers()
        assert ours.exec(id, "echo", "alive") == "alive\n"
        assert ours.run("echo", "again") == "again\n"
        assert server().pid != warm.pid


def test_killed_again_and_again_during_starts(ours: Ctr, warm: psutil.Process) -> None:
    over = threading.Event()

    def kill() -> None:
        while not over.wait(random.uniform(0.01, 0.2)):
            end_servers()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda number: ours.run("echo", str(number)), range(16))) == [
                f"{number}\n" for number in range(16)
            ]
    finally:
        over.set()
        killer.join()


@pytest.mark.timeout(600)
def test_fifty_starts_at_once_on_a_cold_node(ours: Ctr, cold: None) -> None:
    before = Snapshot.take()
    ids = [ours.new_id() for _ in range(50)]
    try:
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(lambda id: run(ours.run_argv(id, "sleep", "1000", flags=["-d"]), timeout=120), ids))
        assert len(Snapshot.take().shims - before.shims) == 50
        assert {ours.status(id) for id in ids} == {"RUNNING"}
        eventually(lambda: len(servers()) == 1, seconds=60)  # on a node that has fifty containers to start
        assert len(list(SOCKETS.iterdir())) == 1
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ours.remove, ids))


def test_hanging_one_is_done_without_and_replaced(ours: Ctr, warm: psutil.Process) -> None:
    end_servers(signal.SIGSTOP)
    assert ours.run("echo", "direct") == "direct\n"
    eventually(lambda: ended(warm))
    assert ours.run("echo", "next") == "next\n"
    assert server().pid != warm.pid
    end_servers(signal.SIGCONT)


def test_removed_socket_ends_it_and_the_next_start_leaves_another(ours: Ctr, warm: psutil.Process) -> None:
    for path in SOCKETS.iterdir():
        path.unlink()
    eventually(lambda: ended(warm))
    assert ours.run("echo", "again") == "again\n"
    assert server().pid != warm.pid


def test_upgrade_under_load(ours: Ctr, warm: psutil.Process) -> None:
    """The package is replaced while containers start: the old daemons run on, the new ones are of the new package."""
    init = PACKAGE / "__init__.py"
    copy = init.with_name("__init__.new")
    try:
        with ours.running("sleep", "1000") as old, ThreadPoolExecutor(3) as pool:
            lines = [pool.submit(ours.run, "echo", str(number)) for number in range(12)]
            eventually(lambda: any(line.done() for line in lines))
            shutil.copy(init, copy)
            copy.rename(init)
            assert [line.result() for line in lines] == [f"{number}\n" for number in range(12)]
            assert ours.run("echo", "new") == "new\n"
            eventually(lambda: len(servers()) == 2)  # not while a successor takes over, which may be just now
            assert not ended(warm)
            assert ours.exec(old, "echo", "old") == "old\n"
            with ours.running("sleep", "1000") as new:
                assert shim_of(ours, new).ppid() != warm.pid
    finally:
        end_servers()


def test_starts_that_are_killed_in_the_middle_leave_nothing(warm: psutil.Process, tmp_path: Path) -> None:
    """containerd kills `start` when its own caller has given up."""
    before = Snapshot.take()
    for number in range(30):
        bundle = tmp_path / str(number)  # it stays: the daemon of such a start may still write into it
        bundle.mkdir()
        Path(bundle, "config.json").write_text(json.dumps({}))
        started = subprocess.Popen(
            start_argv(f"k{number}-{os.getpid()}"), cwd=bundle, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        time.sleep(number * 0.002)
        started.kill()
        started.wait()
    eventually(lambda: not before.added(Snapshot.take()), seconds=UNWANTED_SECONDS)
    assert len(servers()) == 1


def test_it_ends_when_nobody_has_needed_it_for_long_enough(ours: Ctr, cold: None, shim_config: Path) -> None:
    shim_config.write_text("fork_server_idle = 2\n")
    with ours.running("sleep", "1000") as id:
        eventually(lambda: not servers())
        assert list(SOCKETS.iterdir()) == []
        assert ours.exec(id, "echo", "alive") == "alive\n"

"""Cgroups against the real kernel, in every version that the host has: real processes, freezer, kills, OOM."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from kybernate_shim.linux.cgroup.cgroup import Cgroup, join_shim_cgroup
from kybernate_shim.linux.cgroup.hierarchies import UNIFIED, hierarchy_mounts
from kybernate_shim.linux.cgroup.oom import OomWatch, oom_kills
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.messages import cgroup1_pb2, cgroup2_pb2

pytestmark = pytest.mark.root

T = TypeVar("T")
NAME = f"kybernate-test-{os.getpid()}"
MIB = 1 << 20
CONTROLLERS = ("freezer", "pids", "memory", "devices", "cpu", "cpuacct", "blkio")


def roots(version: int) -> dict[str, Path]:
    mounts = {controller: group[0].path for controller, group in hierarchy_mounts(read_mountinfo()).items()}
    wanted = (UNIFIED,) if version == 2 else CONTROLLERS
    return {controller: mounts[controller] for controller in wanted if controller in mounts}


def controllers(version: int) -> list[str]:
    return list(roots(1)) if version == 1 else (roots(2)[UNIFIED] / "cgroup.controllers").read_text().split()


VERSIONS = [version for version in (1, 2) if roots(version)]
WITH_MEMORY = [version for version in VERSIONS if "memory" in controllers(version)]


def eventually(look: Callable[[], T], *, seconds: float = 10) -> T:
    """Return the first true answer of `look`. Fails with the last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < deadline, f"still {answer!r} after {seconds} s"
        time.sleep(0.005)
    return answer


def made(version: int, name: str, *, enable: bool = True) -> Cgroup:
    cgroup = Cgroup(version, {controller: path / name for controller, path in roots(version).items()})
    for path in cgroup.directories.values():
        path.mkdir(exist_ok=True)
    if enable:
        enable_controllers(cgroup)
    return cgroup


def enable_controllers(cgroup: Cgroup) -> None:
    """Give the cgroup the files of every controller that the host has, as far as its kernel lets us (version 2)."""
    if cgroup.version == 1:
        return
    root = roots(2)[UNIFIED]
    for ancestor in [path for path in reversed(cgroup.path().parents) if path.is_relative_to(root)]:
        for controller in (ancestor / "cgroup.controllers").read_text().split():
            with suppress(OSError):  # one that cannot be enabled, as with processes in an inner cgroup
                (ancestor / "cgroup.subtree_control").write_text(f"+{controller}")


def removed(cgroup: Cgroup) -> None:
    cgroup.kill()
    eventually(lambda: not cgroup.processes())
    for path in set(cgroup.directories.values()):
        for directory, _, _ in os.walk(path, topdown=False):
            Path(directory).rmdir()


@pytest.fixture(params=VERSIONS, ids=lambda version: f"v{version}")
def cgroup(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    cgroup = made(request.param, NAME)
    yield cgroup
    removed(cgroup)


@pytest.fixture(params=WITH_MEMORY, ids=lambda version: f"v{version}")
def pod(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    """A cgroup with a memory limit, as a pod is."""
    pod = made(request.param, NAME)
    limit = "memory.limit_in_bytes" if pod.version == 1 else "memory.max"
    (pod.path("memory") / limit).write_text(str(20 * MIB))
    yield pod
    removed(pod)


def started(cgroup: Cgroup, script: str) -> subprocess.Popen[bytes]:
    """Start a shell script inside the cgroup; it begins once it is there."""
    process = subprocess.Popen(["/bin/sh", "-c", f"read go; {script}"], stdin=subprocess.PIPE)
    cgroup.join(process.pid)
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.close()
    return process


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=20)


def test_cgroup_of_a_process_is_where_it_was_put(cgroup: Cgroup) -> None:
    process = started(cgroup, "sleep 60")
    found = Cgroup.of(process.pid)
    if cgroup.version == max(VERSIONS) and len(VERSIONS) > 1:
        assert found.version == 1, "on a hybrid host the controllers decide"
    else:
        assert found.version == cgroup.version
        assert {**found.directories, **cgroup.directories} == found.directories
        assert found.path("memory") == cgroup.path("memory")
    assert found.exists
    process.kill()
    ended(process)


def test_process_that_has_ended_has_no_cgroup() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if 1 in VERSIONS:  # version 2 remembers it for a zombie
        with pytest.raises(ProcessLookupError):
            Cgroup.of(pid)
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        Cgroup.of(pid)


def test_processes_are_found_in_the_whole_tree(cgroup: Cgroup) -> None:
    inner = Cgroup(cgroup.version, {name: path / "inner" for name, path in cgroup.directories.items()})
    for path in set(inner.directories.values()):
        path.mkdir()
    outside, inside = started(cgroup, "exec sleep 60"), started(inner, "exec sleep 60")
    assert cgroup.processes() == sorted([outside.pid, inside.pid])
    assert inner.processes() == [inside.pid]
    cgroup.kill()
    assert (ended(outside), ended(inside)) == (-signal.SIGKILL, -signal.SIGKILL)
    eventually(lambda: not cgroup.processes())


def test_figures_grow_with_work(cgroup: Cgroup) -> None:
    process = started(cgroup, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; exec sleep 60")
    eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    stats = cgroup.stats()
    if isinstance(stats, cgroup2_pb2.Metrics):
        assert stats.cpu.usage_usec > 10_000
        assert stats.cpu.usage_usec == pytest.approx(stats.cpu.user_usec + stats.cpu.system_usec, abs=2)
    else:
        assert isinstance(stats, cgroup1_pb2.Metrics)
        assert stats.cpu.usage.total > 10_000_000
        assert sum(stats.cpu.usage.per_cpu) == pytest.approx(stats.cpu.usage.total, rel=0.2)
        assert stats.memory.usage.usage > 0
        assert stats.memory.usage.limit > stats.memory.usage.usage
        assert stats.pids.current == 1
    process.kill()
    ended(process)


def test_figures_of_a_removed_cgroup_are_an_error(cgroup: Cgroup) -> None:
    gone = Cgroup(cgroup.version, {name: path / "never" for name, path in cgroup.directories.items()})
    assert not gone.exists
    assert gone.processes() == []
    with pytest.raises(FileNotFoundError):
        gone.stats()
    gone.kill()


def test_frozen_processes_stand_still_until_thawed(cgroup: Cgroup, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    process = started(cgroup, f"while :; do echo >>{ticks}; sleep 0.01; done")
    eventually(lambda: ticks.exists() and ticks.stat().st_size > 2)
    assert not cgroup.frozen
    cgroup.freeze()
    assert cgroup.frozen
    size = ticks.stat().st_size
    time.sleep(0.1)  # long enough for ten ticks of a process that runs
    assert ticks.stat().st_size == size
    cgroup.thaw()
    assert eventually(lambda: not cgroup.frozen)
    eventually(lambda: ticks.stat().st_size > size)
    process.kill()
    ended(process)


def test_many_forking_processes_are_frozen_and_killed(cgroup: Cgroup) -> None:
    processes = [started(cgroup, "while :; do /bin/true; done") for _ in range(4)]
    cgroup.freeze()
    cgroup.kill()
    assert [ended(process) for process in processes] == [-signal.SIGKILL] * 4
    eventually(lambda: not cgroup.processes())
    order = cgroup.path("freezer") / "freezer.state" if cgroup.version == 1 else cgroup.path() / "cgroup.freeze"
    assert order.read_text().strip() in ("THAWED", "0"), "what is empty must not look like a paused container"


REPLACED = """
import os, sys, threading
for _ in range(16):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
os.write(1, b".")
os.execv(sys.executable, [sys.executable, "-S", "-E", "-c", sys.argv[1], sys.argv[1]])
"""


def test_process_of_many_threads_that_executes_programs_is_frozen(cgroup: Cgroup) -> None:
    """The thread that executes one waits for the end of the others, which must be able to end."""
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", REPLACED, REPLACED], stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    cgroup.join(process.pid)
    for _ in range(40):
        cgroup.freeze(timeout=20)
        assert cgroup.frozen
        cgroup.thaw()
        eventually(lambda: process.stdout and process.stdout.read())  # it executes programs as before
    process.kill()
    ended(process)
    process.stdout.close()


def test_own_cgroup_is_neither_frozen_nor_killed(cgroup: Cgroup) -> None:
    script = (
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from kybernate_shim.linux.cgroup.cgroup import Cgroup\nfrom kybernate_shim.errors import Refused\n"
        "cgroup = Cgroup(int(sys.argv[1]), {k: Path(v) for k, v in json.loads(sys.argv[2]).items()})\n"
        "cgroup.join(os.getpid())\n"
        "for act in (cgroup.freeze, cgroup.kill):\n"
        "    try: act()\n"
        "    except Refused: print('refused')\n"
    )
    paths = json.dumps({name: str(path) for name, path in cgroup.directories.items()})
    argv = [sys.executable, "-c", script, str(cgroup.version), paths]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert (done.stdout, done.stderr) == ("refused\nrefused\n", "")


def test_shim_is_moved_into_the_cgroup_of_its_option(cgroup: Cgroup) -> None:
    if cgroup.version == 2 and 1 in VERSIONS:
        with pytest.raises(FileNotFoundError, match=NAME):  # the controllers' hierarchies decide, and lack it
            join_shim_cgroup(f"/{NAME}", os.getpid())
        return
    process = started(cgroup, "exec sleep 60")
    other = made(cgroup.version, f"{NAME}-shim")
    join_shim_cgroup(f"/{NAME}-shim", process.pid)
    assert other.processes() == [process.pid]
    removed(other)
    ended(process)


def test_cgroups_are_found_from_inside_a_cgroup_namespace(cgroup: Cgroup) -> None:
    """Seen from a namespace that begins at `cgroup`, with the host's mounts: one below, one next to it, one above."""
    places = {"below": f"{NAME}/below", "beside": f"{NAME}-beside"}
    # A cgroup of version 2 that hands controllers down may hold no process itself, and this one must.
    cgroups = {place: made(cgroup.version, name, enable=False) for place, name in places.items()}
    processes = {place: started(cgroups[place], "exec sleep 60") for place in places}
    script = (
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from kybernate_shim.linux.cgroup.hierarchies import directories\n"
        "from kybernate_shim.linux.libc import unshare\n"
        "for path in json.loads(sys.argv[1]): Path(path, 'cgroup.procs').write_text(str(os.getpid()))\n"
        "unshare(0x2000000)  # CLONE_NEWCGROUP\n"
        "pids = json.loads(sys.argv[2])\n"
        "found = {place: directories(pid) for place, pid in pids.items()}\n"
        "print(json.dumps({place: {k: str(v) for k, v in paths.items()} for place, paths in found.items()}))\n"
    )
    arguments = [json.dumps([str(path) for path in set(cgroup.directories.values())])]
    arguments.append(json.dumps({place: process.pid for place, process in processes.items()}))
    try:
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    finally:
        for place, process in processes.items():
            removed(cgroups[place])
            ended(process)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for place, expected in cgroups.items():
        for controller, path in expected.directories.items():
            assert found[place].get(controller) == str(path), (place, controller)


# -- Memory -----------------------------------------------------------------------------------------------------------


def container(pod: Cgroup, name: str) -> Cgroup:
    return made(pod.version, f"{NAME}/{name}")


def wait_for_kill(watch: OomWatch) -> None:
    """Do what an event loop does: read() whenever the descriptor is readable, until it says yes."""

    def look() -> bool:
        return bool(select.select([watch], [], [], 0.05)[0]) and watch.read()

    eventually(look)


def wait_for_quiet(watch: OomWatch) -> list[bool]:
    """Answer the descriptor until it has been silent for a second; returns what read() said."""
    answers = []
    while select.select([watch], [], [], 1.5)[0]:
        answers.append(watch.read())
        assert len(answers) < 20, "the descriptor does not fall silent"
    return answers


def test_kill_of_a_child_is_reported_while_the_container_lives(pod: Cgroup) -> None:
    victim = container(pod, "victim")
    watch = OomWatch(victim)
    process = started(victim, "tail /dev/zero; exec sleep 60")
    wait_for_kill(watch)
    assert oom_kills(victim) == 1
    assert process.poll() is None
    assert not any(wait_for_quiet(watch)), "one kill must be one report"
    process.kill()
    ended(process)
    watch.close()


def test_kill_elsewhere_in_the_pod_is_not_ours(pod: Cgroup) -> None:
    victim, bystander = container(pod, "victim"), container(pod, "bystander")
    theirs, ours = OomWatch(victim), OomWatch(bystander)
    sleeper = started(bystander, "exec sleep 60")
    process = started(victim, "exec tail /dev/zero")
    assert ended(process) == -signal.SIGKILL
    wait_for_kill(theirs)
    assert not any(wait_for_quiet(ours))
    sleeper.kill()
    ended(sleeper)
    for watch in (theirs, ours):
        watch.close()


def test_kill_is_known_at_the_exit_without_waiting_for_the_notice(pod: Cgroup) -> None:
    watch = OomWatch(pod)
    assert ended(started(pod, "exec tail /dev/zero")) == -signal.SIGKILL
    assert watch.read()
    watch.close()


def test_removed_cgroup_is_no_kill_and_falls_silent(pod: Cgroup) -> None:
    gone = container(pod, "gone")
    watch = OomWatch(gone)
    removed(gone)
    assert not any(wait_for_quiet(watch))
    assert not watch.read()
    watch.close()

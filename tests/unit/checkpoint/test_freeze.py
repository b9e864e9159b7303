"""A container is frozen where CRIU can take hold of it: not while a vfork waits for its child's program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from kybernate_shim.checkpoint import freeze
from kybernate_shim.checkpoint.freeze import freeze_container, is_stopped, vforks
from kybernate_shim.linux import process as linux_process
from kybernate_shim.linux.cgroup.cgroup import Cgroup, FreezeTimedOut
from tests.fakes.actor import eventually

BEGIN = """
import os, sys
until_open = (os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)
os.waitpid(os.posix_spawn(sys.executable, ["python", "-c", "input()"], {}, file_actions=[until_open]), 0)
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def vforking(fifo: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose child executes its program once a process writes to the FIFO, and then stays."""
    with subprocess.Popen([sys.executable, "-c", BEGIN, str(fifo)], stdin=subprocess.PIPE) as process:
        yield process
        for child in psutil.Process(process.pid).children():
            child.kill()  # it would wait for a writer forever
        process.kill()


def family(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the pids of a process and its child, which it may be about to begin."""
    parent = psutil.Process(process.pid)
    assert eventually(lambda: bool(parent.children()))
    return [parent.pid, *(child.pid for child in parent.children())]


class FakeCgroup:
    """Has these processes in it whenever it is frozen, one list after the other, and notes what it is told."""

    def __init__(self, *pids: list[int], version: int = 2) -> None:
        self.version = version
        self.pids = list(pids)
        self.orders: list[str] = []

    def freeze(self) -> None:
        self.orders.append("freeze")

    def thaw(self) -> None:
        self.orders.append("thaw")

    def processes(self) -> list[int]:
        return self.pids.pop(0) if len(self.pids) > 1 else self.pids[0]


def test_vfork_is_seen_until_its_child_executes_a_program(vforking: subprocess.Popen[bytes], fifo: Path) -> None:
    parent, child = family(vforking)
    assert list(vforks([parent, child])) == [(parent, child)]
    assert not list(vforks([child]))
    assert not list(vforks([parent]))
    fifo.write_text("")
    assert eventually(lambda: not list(vforks([parent, child])))


def test_processes_of_their_own_and_those_that_have_ended_are_no_vfork() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert not list(vforks([os.getpid(), child.pid]))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not list(vforks([os.getpid(), child.pid]))
    assert not list(vforks([os.getpid(), child.pid]))


def test_cgroup_is_frozen_anew_after_a_vfork(vforking: subprocess.Popen[bytes]) -> None:
    pids = family(vforking)
    cgroup = FakeCgroup(pids, pids, pids[:1])
    freeze_container(cast(Cgroup, cgroup))
    assert cgroup.orders == ["freeze", "thaw", "freeze", "thaw", "freeze"]


def test_vfork_that_does_not_end_is_named(vforking: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = family(vforking)
    cgroup = FakeCgroup([parent, child])
    monkeypatch.setattr(freeze, "title_of", lambda pid: {parent: f"one[{parent}]", child: f"two[{child}]"}[pid])
    with pytest.raises(FreezeTimedOut, match=rf"one\[{parent}] and two\[{child}], its child"):
        freeze_container(cast(Cgroup, cgroup), seconds=0.1)
    assert cgroup.orders[-1] == "thaw"


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        yield process
        process.kill()


def test_stopped_process_is_seen_until_it_is_continued(stopped: subprocess.Popen[bytes]) -> None:
    if Path(f"/proc/{stopped.pid}/wchan").read_text() == "0":
        pytest.skip("this kernel, or a missing right, hides where a process waits")
    assert eventually(lambda: is_stopped(stopped.pid))
    stopped.send_signal(signal.SIGCONT)
    assert eventually(lambda: not is_stopped(stopped.pid))


def test_process_that_sleeps_or_has_ended_is_not_stopped() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(("version", "refused"), [(1, True), (2, False)])
def test_stopped_process_stands_in_the_way_with_cgroup_version_1(
    monkeypatch: pytest.MonkeyPatch, version: int, refused: bool
) -> None:
    monkeypatch.setattr(freeze, "is_stopped", lambda pid: True)
    cgroup = FakeCgroup([os.getpid()], version=version)
    if refused:
        with pytest.raises(FreezeTimedOut, match=rf"\[{os.getpid()}] has been stopped by a signal"):
            freeze_container(cast(Cgroup, cgroup), seconds=0.1)
        assert cgroup.orders[-1] == "thaw"
    else:
        freeze_container(cast(Cgroup, cgroup), seconds=0.1)
        assert cgroup.orders == ["freeze"]


WITHOUT_FIRST_THREAD = """
import ctypes, sys, threading
def left():
    sys.stdin.readline()
    import os
    os._exit(0)
threading.Thread(target=left).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2), of this thread alone
"""


@pytest.fixture
def without_first_thread() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", WITHOUT_FIRST_THREAD]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert eventually(lambda: linux_process.first_thread_has_ended(process.pid))
            yield process
        finally:
            process.kill()


def test_container_is_frozen_anew_until_a_process_that_was_being_killed_has_ended(
    without_first_thread: subprocess.Popen[bytes],
) -> None:
    class Ending(FakeCgroup):
        def thaw(self) -> None:
            super().thaw()
            without_first_thread.kill()
            without_first_thread.wait()

    cgroup = Ending([without_first_thread.pid])
    freeze_container(cast(Cgroup, cgroup))
    assert cgroup.orders == ["freeze", "thaw", "freeze"]


def test_process_that_stays_without_its_first_thread_is_named(without_first_thread: subprocess.Popen[bytes]) -> None:
    cgroup = FakeCgroup([without_first_thread.pid])
    with pytest.raises(FreezeTimedOut, match=rf"first thread of .*\[{without_first_thread.pid}] has ended"):
        freeze_container(cast(Cgroup, cgroup), seconds=0.1)
    assert cgroup.orders[-1] == "thaw"


TRACER = """
import ctypes, os, time
libc, child = ctypes.CDLL(None), os.fork()
if child == 0:
    time.sleep(1000)
assert libc.ptrace(0x4206, child, None, None) == 0  # PTRACE_SEIZE
print(child, flush=True)
input()
assert libc.ptrace(0x4207, child, None, None) == 0  # PTRACE_INTERRUPT
os.waitpid(child, 0x40000000)
assert libc.ptrace(17, child, None, None) == 0  # PTRACE_DETACH
print(flush=True)
input()
"""


@pytest.fixture
def traced() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that traces another one until a line is written to it, and the pid of that."""
    with subprocess.Popen(
        [sys.executable, "-c", TRACER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as tracer:
        assert tracer.stdout is not None
        child = int(tracer.stdout.readline())
        yield tracer, child
        os.kill(child, signal.SIGKILL)
        tracer.kill()


def test_container_is_frozen_anew_until_none_of_its_processes_traces_another(
    traced: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, child = traced
    monkeypatch.setattr(linux_process, "is_nodes_own", lambda pid: False)

    class Detaching(FakeCgroup):
        def thaw(self) -> None:
            super().thaw()
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            tracer.stdin.write(b"\n")
            tracer.stdout.readline()

    cgroup = Detaching([tracer.pid, child])
    freeze_container(cast(Cgroup, cgroup))
    assert cgroup.orders == ["freeze", "thaw", "freeze"]


@pytest.mark.parametrize("own", [False, True], ids=["stranger", "root"])
def test_process_that_stays_traced_is_named_unless_the_node_traces_it(
    traced: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    tracer, child = traced
    monkeypatch.setattr(linux_process, "is_nodes_own", lambda pid: own)
    cgroup = FakeCgroup([child])
    if own:
        freeze_container(cast(Cgroup, cgroup), seconds=0.1)
        assert cgroup.orders == ["freeze"]
    else:
        with pytest.raises(FreezeTimedOut, match=rf"\[{child}] is traced by .*\[{tracer.pid}] \(ptrace"):
            freeze_container(cast(Cgroup, cgroup), seconds=0.1)
        assert cgroup.orders[-1] == "thaw"

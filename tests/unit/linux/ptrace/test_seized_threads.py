"""Processes whose threads are held: which of them, by whom, and until when."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kybernate_shim.linux.process_memory import read_maps
from kybernate_shim.linux.ptrace import seized
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed, TargetEnded, TargetUnresponsive
from tests.fakes.memory_process import MemoryProcess, drop_pages
from tests.unit.linux.ptrace.threads import (
    MIB,
    await_state,
    await_that,
    is_untraced,
    parent_of,
    state_of,
    thread_names,
)


def test_other_threads_compute_on_while_one_is_held() -> None:
    with MemoryProcess() as target:
        target.ask("globals().update(n=[0])")
        count = "lambda: [n.__setitem__(0, n[0] + 1) for _ in iter(int, 1)]"
        target.ask(f"threading.Thread(target={count}, daemon=True).start()")
        region = target.region("a", 4 * MIB)
        before = target.ask("n[0]")
        for _ in range(50):
            drop_pages(target.pid, region.start, region.size)
        assert target.ask("n[0]") > before


def test_all_threads_are_held_except_the_spared_ones() -> None:
    with MemoryProcess() as target:
        name = "libc.prctl(15, b'cuda-worker', 0, 0, 0)"
        for action in (name, "0", "0"):
            target.ask(f"threading.Thread(target=lambda: [{action}, time.sleep(60)], daemon=True).start()")
        await_that(lambda: "cuda-worker" in thread_names(target.pid).values(), "the worker's name")
        with SeizedProcess(target.pid, spare=lambda name: name.startswith("cuda")) as held:
            spared = [tid for tid, thread in thread_names(target.pid).items() if thread.startswith("cuda")]
            assert sorted([*held.tids, *spared]) == sorted(thread_names(target.pid))
            assert {state_of(tid) for tid in held.tids} == {"t"}
            assert {state_of(tid) for tid in spared} == {"S"}
            assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        assert target.ask("1 + 1") == 2


def test_main_thread_is_held_whatever_the_program_is_called() -> None:
    with MemoryProcess() as target:
        assert target.ask("libc.prctl(15, b'cuda-server', 0, 0, 0)") == 0
        with SeizedProcess(target.pid, spare=lambda name: name.startswith("cuda")) as held:
            assert held.tids == [target.pid]
            assert held.spared == []
        assert target.ask("1 + 1") == 2


def test_instruction_is_looked_for_once_and_again_where_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(seized, "read_maps", lambda pid: looks.append(pid) or read_maps(pid))
    with MemoryProcess() as target:
        data = target.region("a", MIB)
        with SeizedProcess(target.pid) as held:
            assert {held.call(held.abi.getpid) for _ in range(5)} == {target.pid}
            assert len(looks) == 1
            held._instruction = data.start
            assert {held.call(held.abi.getpid) for _ in range(5)} == {target.pid}
            assert len(looks) == 2
        assert target.ask("1 + 1") == 2


def test_thread_whose_name_is_no_text_is_held() -> None:
    with MemoryProcess() as target:
        assert target.ask("libc.prctl(15, b'\\xff\\rcuda\\x85', 0, 0, 0)") == 0
        with SeizedProcess(target.pid, spare=lambda name: name.startswith("cuda")) as held:
            assert held.tids == [target.pid]
            assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        os.kill(target.pid, signal.SIGKILL)
        with pytest.raises(TargetEnded):
            drop_pages(target.pid, 0, 4096)


def test_all_threads_go_on_where_one_of_them_cannot_be_held() -> None:
    with MemoryProcess() as target:
        for _ in range(3):
            target.ask("threading.Thread(target=lambda: time.sleep(60), daemon=True).start()")
        with SeizedProcess(target.pid) as other:
            with pytest.raises(InjectionFailed, match="traces it already"):
                SeizedProcess(target.pid, spare=lambda name: False).__enter__()
            (held,) = other.tids
            assert {tid for tid in thread_names(target.pid) if not is_untraced(tid)} == {held}
        assert target.ask("1 + 1") == 2
        with SeizedProcess(target.pid, spare=lambda name: False) as all_of_them:
            assert all_of_them.tids == sorted(thread_names(target.pid))


def test_process_that_is_tied_ends_with_who_holds_it() -> None:
    code = (
        "import sys, time\n"
        "from kybernate_shim.linux.ptrace.seized import SeizedProcess\n"
        "with SeizedProcess(int(sys.argv[1]), spare=lambda name: False, tied=sys.argv[2] == 'tied'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    for tied in (False, True):
        with MemoryProcess() as target:
            with subprocess.Popen(
                [sys.executable, "-c", code, str(target.pid), "tied" if tied else ""], stdout=subprocess.PIPE
            ) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                holder.kill()
            if tied:
                await_that(lambda: _has_ended(target.pid), "its end")
            else:
                assert target.ask("1 + 1") == 2


def test_process_that_cannot_be_stopped_outlives_the_attempt_to_tie_it(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    code = (
        "import os, sys\n"
        "opened = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opened])\n"
        "print('lives', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(fifo)], stdout=subprocess.PIPE) as target:
        await_state(target.pid, "D")  # it waits for its child's execve
        with pytest.raises(TargetUnresponsive):
            SeizedProcess(target.pid, spare=lambda name: False, tied=True, seconds=0.2).__enter__()
        with fifo.open("w"):
            assert target.stdout is not None
            assert target.stdout.readline() == b"lives\n"


def _has_ended(pid: int) -> bool:
    try:
        return state_of(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_main_thread_that_has_ended_is_passed_over() -> None:
    code = (
        "import ctypes, sys, threading, time\n"
        "def stay():\n    main.join(); print('ready', flush=True); time.sleep(60)\n"
        "main = threading.main_thread()\n"
        "def last():\n    time.sleep(0.05); print('ready', flush=True); time.sleep(60)\n"
        "threading.Thread(target=last).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        assert target.stdout.readline() == b"ready\n"
        await_state(target.pid, "Z")
        try:
            with SeizedProcess(target.pid) as held:
                assert held.tids != [target.pid]
                assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        finally:
            target.kill()


def test_target_that_has_ended_is_named_as_such() -> None:
    with subprocess.Popen(["true"]) as target:
        await_state(target.pid, "Z")
        with pytest.raises(TargetEnded, match="has ended"):
            drop_pages(target.pid, 0, 4096)
    with pytest.raises(TargetEnded, match="has ended"):
        drop_pages(target.pid, 0, 4096)


def test_target_killed_while_held_is_named_as_such() -> None:
    with MemoryProcess() as target, SeizedProcess(target.pid) as held:
        os.kill(target.pid, signal.SIGKILL)
        with pytest.raises(TargetEnded, match="has ended"):
            held.madvise(1 << 40, 4096, 4)


def test_second_tracer_is_refused_and_told_of_the_first() -> None:
    with MemoryProcess() as target, SeizedProcess(target.pid):
        with pytest.raises(InjectionFailed, match=r"cannot be traced.*\(thread \d+ traces it already\)"):
            drop_pages(target.pid, 0, 4096)
        assert state_of(target.pid) == "t"


def test_kernel_thread_is_refused() -> None:
    kernel_threads = parent_of(2) == 0 and Path("/proc/2/comm").read_text() == "kthreadd\n"
    with pytest.raises(InjectionFailed, match="cannot be traced"):
        drop_pages(2 if kernel_threads else os.getpid(), 0, 4096)  # a pid namespace has none


def test_own_process_cannot_be_traced() -> None:
    with pytest.raises(InjectionFailed, match="cannot be traced"):
        drop_pages(os.getpid(), 0, 4096)


def test_tracing_thread_leaves_nothing_behind() -> None:
    with MemoryProcess() as target:
        for _ in range(3):
            with SeizedProcess(target.pid):
                pass
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ptrace")]
        assert "TracerPid:\t0\n" in Path(f"/proc/{target.pid}/status").read_text()

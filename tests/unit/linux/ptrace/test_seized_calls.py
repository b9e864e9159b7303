"""Calls executed in other processes: real ones, in every condition in which a container's process may be."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate_shim.linux.ptrace import seized, tracee
from kybernate_shim.linux.ptrace.seized import SeizedProcess, advise_huge_pages
from kybernate_shim.linux.ptrace.syscall_abi import ARM64, X86_64, Abi, of_this_machine
from kybernate_shim.linux.ptrace.tracee import InjectionFailed, TargetEnded, TargetUnresponsive, Tracee
from tests.fakes.memory_process import MemoryProcess, drop_pages
from tests.unit.linux.ptrace.threads import (
    BLOCKED_CALLS,
    MIB,
    await_state,
    await_that,
    capable_of_all,
    deny_madvise,
    vm_flags,
)


def test_drop_pages_leaves_zeros_and_no_memory() -> None:
    with MemoryProcess() as target:
        region = target.region("a", 8 * MIB)
        target.fill("a", 0, 8 * MIB)
        assert target.resident_kib(region) == 8 * 1024
        drop_pages(target.pid, region.start + 2 * MIB, 4 * MIB)
        assert target.resident_kib(region) == 4 * 1024
        assert target.ask("maps['a'][2 << 20:6 << 20] == bytes(4 << 20) and maps['a'][0] | maps['a'][-1] != 0")


def test_held_thread_answers_with_its_own_pid_and_its_own_errors() -> None:
    abi = of_this_machine()
    assert abi is not None
    with MemoryProcess() as target:
        with SeizedProcess(target.pid) as held:
            assert held.call(abi.getpid) == target.pid
            assert held.call(abi.madvise, 1, 4096, 4) == -errno.EINVAL
            assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        assert target.ask("os.getpid()") == target.pid


@pytest.mark.parametrize("call", BLOCKED_CALLS.values(), ids=BLOCKED_CALLS)
def test_interrupted_call_lasts_as_long_as_it_would_have(call: str) -> None:
    """Python restarts what ends with EINTR, so the time is the proof for those; a wrong restart returns rubbish."""
    with MemoryProcess() as target:
        region = target.region("a", 2 * MIB)
        target.tell(f"[time.monotonic(), {call}, time.monotonic()]")
        for _ in range(20):
            drop_pages(target.pid, region.start, region.size)
        begin, result, end = target.answer()
        assert result in (None, [])
        assert end - begin >= 0.39


def test_blocked_read_gets_its_bytes_after_the_call() -> None:
    reader, writer = os.pipe()
    code = "import os; os.write(1, b'R'); os.write(1, os.read(0, 4))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=reader, stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        assert target.stdout.read(1) == b"R"
        for _ in range(5):
            with SeizedProcess(target.pid) as held:
                assert held.tids == [target.pid]
        os.write(writer, b"data")
        assert target.stdout.read() == b"data"
    os.close(reader)
    os.close(writer)


def test_signals_that_arrive_meanwhile_are_delivered_once_each() -> None:
    with MemoryProcess() as target:
        target.ask("globals().update(seen=[])")
        handlers = "[signal.signal(n, lambda number, frame: seen.append(number)) for n in (10, 12, 5)]"
        target.ask(f"str({handlers})")
        with SeizedProcess(target.pid) as held:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTRAP):
                os.kill(target.pid, number)
            assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        assert sorted(target.ask("seen")) == [5, 10, 12]


def test_target_that_ignores_sigtrap_still_does_afterwards() -> None:
    with MemoryProcess() as target:
        target.ask("str(signal.signal(signal.SIGTRAP, signal.SIG_IGN))")
        region = target.region("a", 2 * MIB)
        drop_pages(target.pid, region.start, region.size)
        assert target.ask("signal.getsignal(signal.SIGTRAP) == signal.SIG_IGN")
        os.kill(target.pid, signal.SIGTRAP)
        assert target.ask("1 + 1") == 2


def test_signal_mask_is_what_it_was() -> None:
    with MemoryProcess() as target:
        target.ask("str(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP]))")
        with SeizedProcess(target.pid) as held:
            held.madvise(1 << 40, 4096, 4)
        assert target.ask("[int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]") == [signal.SIGHUP]


def test_stopped_target_stays_stopped_and_its_pages_are_dropped() -> None:
    with MemoryProcess() as target:
        region = target.region("a", 2 * MIB)
        target.fill("a", 0, 2 * MIB)
        os.kill(target.pid, signal.SIGSTOP)
        os.waitpid(target.pid, os.WUNTRACED)
        drop_pages(target.pid, region.start, region.size)
        assert target.resident_kib(region) == 0
        await_state(target.pid, "T")
        os.kill(target.pid, signal.SIGCONT)
        assert target.ask("maps['a'][:2 << 20] == bytes(2 << 20)")


def test_stop_signal_during_the_call_stops_the_target_afterwards() -> None:
    with MemoryProcess() as target:
        with SeizedProcess(target.pid) as held:
            os.kill(target.pid, signal.SIGSTOP)
            assert held.madvise(1 << 40, 4096, 4) == -errno.ENOMEM
        await_state(target.pid, "T")
        os.kill(target.pid, signal.SIGCONT)
        assert target.ask("1 + 1") == 2


def test_call_that_passes_its_deadline_gives_the_thread_back() -> None:
    populate_write = 23  # of 1 GiB: takes far longer than the deadline
    with MemoryProcess() as target:
        region = target.region("a", 1 << 30)
        target.tell("[1, time.sleep(0.01), 2]")
        with SeizedProcess(target.pid) as held:
            held._seconds = 0.02
            with pytest.raises(TargetUnresponsive, match="did not stop in time"):
                held.madvise(region.start, region.size, populate_write)
            held._seconds = 10.0
            assert held.madvise(region.start, region.size, 4) == region.size
        assert target.answer() == [1, None, 2]
        assert target.resident_kib(region) == 0


def test_seccomp_filter_without_madvise_does_not_stop_the_call() -> None:
    """Needs CAP_SYS_ADMIN for suspending the filter; without it the kernel's answer is reported as one."""
    with MemoryProcess() as target:
        region = target.region("a", 2 * MIB)
        target.fill("a", 0, 2 * MIB)
        target.ask(f"({deny_madvise()})")
        assert target.ask("[libc.madvise(None, 0, 4), ctypes.get_errno()]") == [-1, errno.EPERM]
        if capable_of_all():
            drop_pages(target.pid, region.start, region.size)
            assert target.resident_kib(region) == 0
        else:
            with pytest.raises(InjectionFailed, match="not permitted"):
                drop_pages(target.pid, region.start, region.size)
        assert target.ask("[libc.madvise(None, 0, 4), ctypes.get_errno()]") == [-1, errno.EPERM]


def test_locked_memory_is_dropped_as_well() -> None:
    with MemoryProcess() as target:
        region = target.region("a", 2 * MIB)
        assert target.ask(f"libc.mlock(ctypes.c_void_p({region.start}), {64 << 10})") == 0
        target.fill("a", 0, 2 * MIB)
        drop_pages(target.pid, region.start, 64 << 10)
        assert target.resident_kib(region) == 2048 - 64


def test_long_range_is_dropped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seized, "STEP_BYTES", MIB)
    with MemoryProcess() as target:
        region = target.region("a", 5 * MIB)
        target.fill("a", 0, 5 * MIB)
        drop_pages(target.pid, region.start, region.size)
        assert target.resident_kib(region) == 0
        target.fill("a", 0, 2 * MIB)
        with pytest.raises(InjectionFailed, match=r"only \d+ of 106954752 bytes were dropped"):
            drop_pages(target.pid, region.start, 102 * MIB)


def test_advised_region_is_filled_with_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    with MemoryProcess() as target:
        region = target.region("a", 8 * MIB)
        advise_huge_pages(target.pid, region.start, region.size)
        target.fill("a", 0, 8 * MIB)
        if enabled.exists() and "[never]" not in enabled.read_text():
            assert target.resident_kib(region, "AnonHugePages") > 0
        assert "hg" in vm_flags(target.pid, region.start)


def test_unknown_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(InjectionFailed, match="x86-64 and arm64"):
        drop_pages(1, 0, 4096)


def test_instruction_is_found_where_it_may_be_executed() -> None:
    assert X86_64.find(b"\x90\x0f\x05\xc3") == 1
    assert X86_64.find(b"\x0f\x06") == -1
    misplaced, placed = b"\0\0" + ARM64.instruction, b"\0\0" + ARM64.instruction * 2
    assert ARM64.find(misplaced) == -1
    assert ARM64.find(misplaced + b"\0\0" + ARM64.instruction) == 8
    assert ARM64.find(placed[2:]) == 0


def test_prepared_registers_say_what_the_kernel_expects() -> None:
    x86 = X86_64.prepare(list(range(27)), 0x1000, 28, (-1, 2, 3))
    assert (x86[16], x86[10], x86[14], x86[13], x86[12], x86[15]) == (0x1000, 28, 2**64 - 1, 2, 3, 2**64 - 1)
    assert x86[7:10] == [7, 8, 9]  # not an argument: untouched
    arm = ARM64.prepare([*range(33), 0x60000C00], 0x2000, 233, (1, 2, 4))
    assert (arm[32], arm[8], arm[:3], arm[33]) == (0x2000, 233, [1, 2, 4], 0x60000000)


@pytest.mark.parametrize("abi", [X86_64, ARM64], ids=["x86-64", "arm64"])
def test_prepared_call_is_known_at_its_entry(abi: Abi) -> None:
    """All that seccomp would look at: architecture, address, number and six arguments, also those not asked for."""
    prepared = abi.prepare(list(range(100, 100 + abi.words)), 0x1000, 28, (-1, 2, 3))
    rest = [100 + register for register in abi.arguments[3:]]
    assert abi.entered(prepared, 28) == (
        abi.architecture,
        0x1000 + len(abi.instruction),
        28,
        2**64 - 1,
        2,
        3,
        *rest,
    )


def test_tracee_of_a_vanished_thread_is_named() -> None:
    with pytest.raises(TargetEnded):
        Tracee(2**22 - 1, X86_64, 0)


PPOLL = {"x86_64": 271, "aarch64": 73}[platform.machine()]  # of nothing, without an end
TRACER = f"""
import sys
from kybernate_shim.linux.ptrace.seized import SeizedProcess
with SeizedProcess(int(sys.argv[1])) as held:
    held.call({PPOLL}, 0, 0, 0, 0, 0)
"""


def makes_call(pid: int, number: int) -> bool:
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(number)


def test_thread_does_not_continue_with_our_registers_when_we_die() -> None:
    """What it was about to do is known to its tracer alone: it would take the result of our call for its own one's."""
    with MemoryProcess() as target:
        with subprocess.Popen([sys.executable, "-c", TRACER, str(target.pid)]) as tracer:
            try:
                await_that(lambda: makes_call(target.pid, PPOLL), "call of ours")
            finally:
                tracer.kill()
        await_state(target.pid, "Z")


def test_tracer_that_is_about_to_end_makes_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracee, "injections", injections := tracee.Injections())
    abi = of_this_machine()
    assert abi is not None
    with MemoryProcess() as target, SeizedProcess(target.pid) as held:
        assert held.call(abi.getpid) == target.pid
        assert injections.close(0), "that call has ended"
        with pytest.raises(InjectionFailed, match="about to end"):
            held.call(abi.getpid)


def test_call_that_is_being_made_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracee, "injections", injections := tracee.Injections())
    with MemoryProcess() as target, ThreadPoolExecutor(2) as threads, SeizedProcess(target.pid, seconds=1) as held:
        call = threads.submit(held.call, PPOLL, 0, 0, 0, 0, 0)
        await_that(lambda: makes_call(target.pid, PPOLL), "call of ours")
        assert not injections.close(0.01)
        closing = threads.submit(injections.close, 60)
        with pytest.raises(TargetUnresponsive):
            call.result(60)
        assert closing.result(60)

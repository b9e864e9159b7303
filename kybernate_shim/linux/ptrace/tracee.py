"""One thread of another process under ptrace(2): seize, stop, call, detach. For the one thread that traces it.

Stops are waited for with a deadline, because a frozen thread never stops. System calls are followed by
PTRACE_SYSCALL, not by single steps: those raise SIGTRAP, which costs a target that ignores it its signal disposition.

Another process may have the target's code as memory that it can write, so which call the thread makes is known only at
the call's entry. There it is compared with the requested one, and a different one is cancelled: its number becomes -1,
and the kernel executes nothing. The kernel asks seccomp after that stop (since Linux 4.8), so the target's filters are
suspended there, for the one call, and nowhere else. A cancelled call passes them as well: a filter may end its process
for the number -1.
Source: ptrace(2), "Stopped states", "Syscall-stops" and "PTRACE_SEIZE"; the kernel's kernel/entry/common.c.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.ptrace import requests
from kybernate_shim.linux.ptrace.requests import CONT, DETACH, INTERRUPT, SEIZE, SETOPTIONS, SYSCALL, ptrace
from kybernate_shim.linux.ptrace.syscall_abi import Abi

O_SUSPEND_SECCOMP = requests.O_SUSPEND_SECCOMP
AT_ENTRY = requests.AT_ENTRY
EVENT_STOP = 128
CALL_STOP = signal.SIGTRAP | 0x80
WALL = 0x40000000
PAUSE = 0.0002  # between two looks at a thread that is about to stop
GRACE = 1.0  # for getting back a thread whose call has passed its deadline


class InjectionFailed(Exception):
    """The call could not be executed in the target; the target continues as if nothing had been tried."""


class TargetEnded(InjectionFailed):
    """The thread, or the whole process, is gone or has ended meanwhile."""


class TargetUnresponsive(InjectionFailed):
    """The target did not stop, or did not finish the call, in time: is it frozen?"""


class Injections:
    """Counts the threads of other processes that have our registers in place of their own.

    If this process ends meanwhile, their own registers are lost. Then the kernel kills the process of such a thread,
    which would otherwise continue with the result of our call in place of its own.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._under_way = 0
        self._closed = False

    def begin(self) -> None:
        """Count one more. Raises InjectionFailed where this process is about to end."""
        with self._condition:
            if self._closed:
                raise InjectionFailed("the process that traces is about to end")
            self._under_way += 1

    def end(self) -> None:
        with self._condition:
            self._under_way -= 1
            self._condition.notify_all()

    def close(self, seconds: float) -> bool:
        """Allow no more, and wait until all have ended; return whether they have."""
        with self._condition:
            self._closed = True
            return self._condition.wait_for(lambda: not self._under_way, seconds)


injections = Injections()  # of this process


class Tracee:
    """A stopped thread. Raises as the classes above say when it cannot be had by `deadline` (time.monotonic).

    It executes calls for us; a FollowedTracee stops at its own calls as well. Without a deadline it need not have
    stopped yet: of many threads, all are interrupted before `arrive` waits for each.
    """

    def __init__(self, tid: int, abi: Abi, deadline: float | None) -> None:
        self.tid = tid
        self._abi = abi
        self._options = requests.O_TRACESYSGOOD
        self._own: tuple[list[int], int] | None = None  # its registers and signal mask, while it has ours
        self._running = False
        self._seize()
        with self._let_go_on_failure():
            ptrace(INTERRUPT, tid)
        if deadline is not None:
            self.arrive(deadline)

    def arrive(self, deadline: float) -> None:
        """Wait until the thread has stopped."""
        with self._let_go_on_failure():
            self._await_event_stop(deadline)

    def call(self, address: int, number: int, arguments: Sequence[int], deadline: float) -> int:
        """Execute one system call by the instruction at `address`; return its signed result.

        After TargetUnresponsive the call may have been made or not; after InjectionFailed it has not.
        """
        try:
            if self._own is not None:
                self._come_back(deadline)
            own = self._registers()
            prepared = self._abi.prepare(own, address, number, arguments)
            mask = requests.signal_mask(self.tid)
            self._take(own, mask)
            requests.set_signal_mask(self.tid, 2**64 - 1)
            self._set_registers(prepared)
            return self._pass_through_call(self._abi.entered(prepared, number), deadline)
        except OSError as error:
            raise self._translated(error) from error

    def _take(self, own: list[int], mask: int) -> None:
        """Begin to use the thread: its own registers are known here alone, so it must not outlive us with ours."""
        injections.begin()
        self._own = own, mask
        ptrace(SETOPTIONS, self.tid, 0, self._options | requests.O_EXITKILL)

    def tie(self) -> None:
        """Have the kernel kill the process if the tracing thread ends before this one is detached."""
        self._options |= requests.O_EXITKILL
        try:
            ptrace(SETOPTIONS, self.tid, 0, self._options)
        except OSError as error:
            raise self._translated(error) from error

    def detach(self) -> None:
        """Resume the thread. One that has ended, or never stopped, is left to the end of the tracing thread.

        Waits without limit for one that has been frozen within a call: it must not continue with our registers.
        """
        try:
            if self._own is not None:
                self._come_back(math.inf)
        except TargetEnded:
            return
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
        finally:
            self._forget()
        self._detach(0)

    @contextmanager
    def _let_go_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.detach()
            if isinstance(error, OSError):
                raise self._translated(error) from error
            raise

    def _detach(self, number: int) -> None:
        """Detach the thread, with the signal `number`; 0 for none."""
        try:
            ptrace(DETACH, self.tid, 0, number)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise

    def _seize(self) -> None:
        try:
            ptrace(SEIZE, self.tid, 0, self._options)
        except OSError as error:
            raise self._translated(error) from error

    def _suspend_seccomp(self) -> None:
        """Suspend seccomp's filters, which may forbid the call. Without CAP_SYS_ADMIN, they stay in force."""
        try:
            ptrace(SETOPTIONS, self.tid, 0, self._options | requests.O_EXITKILL | O_SUSPEND_SECCOMP)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise

    def _await_event_stop(self, deadline: float) -> None:
        """Wait for the stop that INTERRUPT asks for; signals that come first are delivered as without a tracer."""
        while (status := self._await_stop(deadline)) >> 16 != EVENT_STOP:
            self._resume(CONT, delivered(status))

    def _resume(self, request: int, number: int) -> None:
        """Resume the thread to its next stop, with the signal `number`; 0 for none."""
        ptrace(request, self.tid, 0, number)
        self._running = True

    def _pass_through_call(self, wanted: tuple[int, ...], deadline: float) -> int:
        """Run from before a call's instruction to behind it; return the result of the call, if it is `wanted`."""
        try:
            self._run_to_call(deadline)
            if found := self._other_than(wanted):
                self._take_back()
                self._run_to_call(deadline)
                self._restore()
                raise InjectionFailed(f"thread {self.tid} made {found} instead of the injected call")
            self._suspend_seccomp()
            self._run_to_call(deadline)
            result = requests.call_info(self.tid).words[0]
            self._restore()
        except TargetUnresponsive:
            ptrace(INTERRUPT, self.tid)
            self._come_back(time.monotonic() + GRACE)
            raise
        return ctypes.c_int64(result).value

    def _run_to_call(self, deadline: float) -> None:
        """Run to the entry of a call, or from there to its exit.

        SIGSTOP cannot be blocked: it is delivered, and the group stop that follows does not concern a tracee. Any other
        signal is a fault of code that has changed; it is not delivered.
        """
        number = 0
        while True:
            self._resume(SYSCALL, number)
            status = self._await_stop(deadline)
            if os.WSTOPSIG(status) == CALL_STOP:
                return
            number = delivered(status)
            if number not in (0, signal.SIGSTOP):
                self._restore()
                name = signal.Signals(number).name
                raise InjectionFailed(f"thread {self.tid} got {name} instead of the injected call")

    def _other_than(self, wanted: tuple[int, ...]) -> str:
        """Return which call is at its entry, "" if it is the `wanted` one."""
        found = requests.call_info(self.tid)
        if found.stop == AT_ENTRY and found.call == wanted:
            return ""
        return f"call {ctypes.c_int64(found.words[0]).value} at {found.instruction:#x}"

    def _take_back(self) -> None:
        """Have the kernel execute nothing in place of the call at whose entry the thread is."""
        if self._abi.under_way >= 0:
            registers = self._registers()
            registers[self._abi.under_way] = requests.NO_CALL % 2**64
            self._set_registers(registers)
        else:
            requests.set_arm_call_number(self.tid, requests.NO_CALL)
        self._suspend_seccomp()

    def _come_back(self, deadline: float) -> None:
        """Wait until an interrupted thread is before or behind its call, and give it its registers back."""
        while self._running:
            status = self._await_stop(deadline)
            if os.WSTOPSIG(status) == CALL_STOP:
                if requests.call_info(self.tid).stop == AT_ENTRY:
                    self._take_back()
                    self._resume(SYSCALL, 0)
            elif delivered(status) == signal.SIGSTOP:
                self._resume(SYSCALL, signal.SIGSTOP)
        self._restore()

    def _restore(self) -> None:
        assert self._own is not None
        registers, mask = self._own
        self._set_registers(registers)
        requests.set_signal_mask(self.tid, mask)
        ptrace(SETOPTIONS, self.tid, 0, self._options)
        self._forget()

    def _forget(self) -> None:
        """Forget the thread's own registers: it has them again, or has ended."""
        if self._own is not None:
            self._own = None
            injections.end()

    def _poll(self) -> int | None:
        """Return the status of the stop that the thread has come to, None while it runs."""
        try:
            found, status = os.waitpid(self.tid, WALL | os.WNOHANG)
        except ChildProcessError:
            raise TargetEnded(f"thread {self.tid} has ended") from None
        if not found:
            return None
        if not os.WIFSTOPPED(status):
            raise TargetEnded(f"thread {self.tid} has ended")
        self._running = False
        return status

    def _await_stop(self, deadline: float) -> int:
        while True:
            if (status := self._poll()) is not None:
                return status
            if time.monotonic() > deadline:
                raise TargetUnresponsive(f"thread {self.tid} did not stop in time: it is frozen or in the kernel")
            time.sleep(PAUSE)

    def _registers(self) -> list[int]:
        found = requests.registers(self.tid, self._abi.words + 1)
        if len(found) != self._abi.words:
            raise InjectionFailed(f"thread {self.tid} is not a 64-bit one")
        return found

    def _set_registers(self, registers: list[int]) -> None:
        requests.set_registers(self.tid, registers)

    def _translated(self, error: OSError) -> InjectionFailed:
        if _has_ended(self.tid):
            return TargetEnded(f"thread {self.tid} has ended")
        if error.errno == errno.ESRCH:  # not stopped any more: it has been killed and is about to end
            try:
                self._await_stop(time.monotonic() + GRACE)
            except InjectionFailed as ended:
                return ended
            return TargetUnresponsive(f"thread {self.tid} runs although it was stopped")
        tracer = _tracer_of(self.tid)
        by = f" (thread {tracer} traces it already)" if tracer else ""
        return InjectionFailed(f"thread {self.tid} cannot be traced: {error.strerror}{by}")


def delivered(status: int) -> int:
    """Return the signal to resume with after a stop: the stop's own, if it is a signal-delivery stop."""
    return 0 if status >> 16 else os.WSTOPSIG(status)


def _status(tid: int) -> dict[str, str]:
    try:
        text = text_of(f"/proc/{tid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.split("\n"))}


def _has_ended(tid: int) -> bool:
    return _status(tid).get("State", "X")[0] in "ZX"


def _tracer_of(tid: int) -> int:
    return int(_status(tid).get("TracerPid", "0"))

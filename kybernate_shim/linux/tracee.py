"""One thread of another process under ptrace(2): seize, stop, call, let go. For the one thread that traces it.

Stops are waited for with a deadline, because a frozen thread never stops. System calls are followed by
PTRACE_SYSCALL, not by single steps: those raise SIGTRAP, which costs a target that ignores it its signal disposition.

Another process may have the target's code as memory that it can write, so which call the thread makes is known only at
the call's entry. There it is compared with the one that was asked for, and another one is taken back: its number
becomes -1, and the kernel executes nothing. The kernel asks seccomp after that stop (since Linux 4.8), so the target's
filters are suspended there, for the one call, and nowhere else. A call that is taken back passes them as well: a
filter may end its process for the number -1.
Source: ptrace(2), "Stopped states", "Syscall-stops" and "PTRACE_SEIZE"; the kernel's kernel/entry/common.c.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kybernate_shim.linux import ptrace_requests as requests
from kybernate_shim.linux.ptrace_requests import CONT, DETACH, INTERRUPT, SEIZE, SETOPTIONS, SYSCALL, CallInfo, ptrace
from kybernate_shim.linux.syscall_abi import Abi

O_SUSPEND_SECCOMP = requests.O_SUSPEND_SECCOMP
AT_ENTRY = requests.AT_ENTRY
EVENT_STOP = 128
CALL_STOP = signal.SIGTRAP | 0x80
WALL = 0x40000000
PAUSE = 0.0002  # between two looks at a thread that is about to stop
GRACE = 1.0  # for getting back a thread whose call has passed its deadline


class InjectionFailed(Exception):
    """The call could not be executed in the target; the target goes on as if nothing had been tried."""


class TracingRefused(InjectionFailed):
    """The kernel does not let us trace the target (another tracer, missing rights, Yama): nothing was changed."""


class TargetEnded(InjectionFailed):
    """The thread, or the whole process, is gone or has ended meanwhile."""


class TargetInterferes(InjectionFailed):
    """The code of the target was changed while the call was made: another call was seen, which was not executed."""


class TargetUnresponsive(InjectionFailed):
    """The target did not stop, or did not finish the call, in time: is it frozen?"""


class Changed(NamedTuple):
    """A call whose arguments are others than the thread's own: where it is, and both, by their index."""

    place: tuple[int, int]
    arguments: Mapping[int, int]
    own: Mapping[int, int]


class Tracee:
    """A stopped thread. Raises as the classes above say when it cannot be had by `deadline` (time.monotonic).

    It is made to make calls, or stops at its own ones. Without a deadline it need not have stopped yet: of many
    threads, all are told to before `arrive` waits for each.
    """

    def __init__(self, tid: int, abi: Abi, deadline: float | None, options: int = 0) -> None:
        """`options` of ptrace(2) are those that hold for the whole time."""
        self.tid = tid
        self._abi = abi
        self._options = requests.O_TRACESYSGOOD | options
        self._own: tuple[list[int], int] | None = None  # its registers and signal mask, while it has ours
        self._running = False
        self._unfiltered = False
        self._seen: CallInfo | None = None  # the last of its own calls that was looked at
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

        After TargetUnresponsive the call may have been made or not; after TargetInterferes it has not.
        """
        try:
            if self._own is not None:
                self._come_back(deadline)
            own = self._registers()
            prepared = self._abi.prepare(own, address, number, arguments)
            self._own = own, requests.signal_mask(self.tid)
            requests.set_signal_mask(self.tid, 2**64 - 1)
            self._set_registers(prepared)
            return self._pass_through_call(self._abi.entered(prepared, number), deadline)
        except OSError as error:
            raise self._translated(error) from error

    def detach(self) -> None:
        """Let the thread go on. One that has ended, or never stopped, is left to the end of the tracing thread.

        Waits without limit for one that has been frozen within a call: it must not go on with our registers.
        """
        try:
            if self._own is not None:
                self._come_back(math.inf)
        except TargetEnded:
            return
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
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
        """Let the thread go on without us, with the signal `number`; 0 for none."""
        try:
            ptrace(DETACH, self.tid, 0, number)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise

    # -- Following the thread's own calls ------------------------------------------------------------------------------

    def go_to_call(self) -> None:
        """Let the thread go on to the entry or the exit of its next call; `at_call` tells when it stands there."""
        self._going(lambda: self._resume(SYSCALL, 0))

    def at_call(self) -> bool:
        """Tell whether the thread stands at a call by now; it gets its signals meanwhile. Raises TargetEnded."""
        while (status := self._poll()) is not None:
            if os.WSTOPSIG(status) == CALL_STOP:
                return True
            number = _delivered(status)
            self._going(lambda: self._resume(SYSCALL, number))  # noqa: B023  # called at once
        return False

    def entered(self) -> tuple[int, tuple[int, ...]] | None:
        """Return number and arguments of the call at whose entry the thread is, None at an exit.

        The number is -1 for a call of another architecture, such as one of 32 bits.
        """
        info = self._seen = self._call_info()
        if info.stop != AT_ENTRY:
            return None
        number = info.words[0] if info.architecture == self._abi.architecture else -1
        return number, tuple(info.words[1:7])

    def returned(self) -> int:
        """Return the result of the call at whose exit the thread is; negative is -errno."""
        return ctypes.c_int64(self._call_info().words[0]).value

    def call_here(self, number: int, arguments: Sequence[int], deadline: float) -> int:
        """Do as `call` at the exit of one of the thread's own calls, by the very instruction of that."""
        try:
            address = self._registers()[self._abi.pc] - len(self._abi.instruction)
        except OSError as error:
            raise self._translated(error) from error
        return self.call(address, number, arguments, deadline)

    def change_arguments(self, changes: Mapping[int, int]) -> Changed:
        """Change arguments, by their index, of the call that `entered` has returned.

        They have to be put back at the call's exit: a program takes all but the result for unchanged.
        Raises TargetEnded where the thread has left that call: a program that is replaced by execve(2) may get its
        thread id.
        """
        try:
            info = requests.call_info(self.tid)
            if self._seen is None or _identity(info) != _identity(self._seen):
                raise TargetEnded(f"thread {self.tid} is not at the call any more that it made")
            registers = self._registers()
            own = {index: registers[self._abi.arguments[index]] for index in changes}
            values = {index: value % 2**64 for index, value in changes.items()}
            self._set_arguments(registers, values)
        except OSError as error:
            raise self._translated(error) from error
        return Changed(info.place, values, own)

    def put_back(self, changed: Changed) -> bool:
        """Put the own arguments back at the exit of a changed call; return False where the thread is not there."""
        try:
            registers = self._registers()
            found = {index: registers[self._abi.arguments[index]] for index in changed.arguments}
            if requests.call_info(self.tid).place != changed.place or found != changed.arguments:
                return False
            self._set_arguments(registers, changed.own)
        except OSError as error:
            raise self._translated(error) from error
        return True

    def _set_arguments(self, registers: list[int], values: Mapping[int, int]) -> None:
        for index, value in values.items():
            registers[self._abi.arguments[index]] = value
        self._set_registers(registers)

    def leave(self) -> None:
        """Let go of a thread that stands at a call or is on its way to one, and wait for one deep in the kernel."""
        number = 0
        try:
            if self._running:
                ptrace(INTERRUPT, self.tid)
                status = self._await_stop(math.inf)
                number = 0 if os.WSTOPSIG(status) == CALL_STOP else _delivered(status)
        except TargetEnded:
            return
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
        self._detach(number)

    def _going(self, resume: Callable[[], None]) -> None:
        try:
            resume()
        except OSError as error:
            raise self._translated(error) from error

    def _call_info(self) -> CallInfo:
        try:
            return requests.call_info(self.tid)
        except OSError as error:
            raise self._translated(error) from error

    def _seize(self) -> None:
        try:
            ptrace(SEIZE, self.tid, 0, self._options)
        except OSError as error:
            raise self._translated(error) from error

    def _suspend_seccomp(self) -> None:
        """A profile of the container may forbid the call to its own processes; needs CAP_SYS_ADMIN, else stays."""
        try:
            ptrace(SETOPTIONS, self.tid, 0, self._options | O_SUSPEND_SECCOMP)
            self._unfiltered = True
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise

    def _await_event_stop(self, deadline: float) -> None:
        """Wait for the stop that INTERRUPT asks for; signals that come first are delivered as without a tracer."""
        while (status := self._await_stop(deadline)) >> 16 != EVENT_STOP:
            self._resume(CONT, _delivered(status))

    def _resume(self, request: int, number: int) -> None:
        """Let the thread go on to its next stop, with the signal `number`; 0 for none."""
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
                raise TargetInterferes(f"thread {self.tid} made {found} in place of the call that it was made to make")
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
        signal is a fault of code that is not what it was; it is not delivered.
        """
        number = 0
        while True:
            self._resume(SYSCALL, number)
            status = self._await_stop(deadline)
            if os.WSTOPSIG(status) == CALL_STOP:
                return
            number = _delivered(status)
            if number not in (0, signal.SIGSTOP):
                self._restore()
                name = signal.Signals(number).name
                raise TargetInterferes(f"thread {self.tid} got {name} in place of the call that it was made to make")

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
            elif _delivered(status) == signal.SIGSTOP:
                self._resume(SYSCALL, signal.SIGSTOP)
        self._restore()

    def _restore(self) -> None:
        assert self._own is not None
        if self._unfiltered:
            ptrace(SETOPTIONS, self.tid, 0, self._options)
            self._unfiltered = False
        registers, mask = self._own
        self._set_registers(registers)
        requests.set_signal_mask(self.tid, mask)
        self._own = None

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
                raise TargetUnresponsive(f"thread {self.tid} did not stop in time: is its container frozen?")
            time.sleep(PAUSE)

    def _registers(self) -> list[int]:
        found = requests.registers(self.tid, self._abi.words + 1)
        if len(found) != self._abi.words:
            raise TracingRefused(f"thread {self.tid} is not a 64-bit one")
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
        return TracingRefused(f"thread {self.tid} cannot be traced: {error.strerror}{by}")


def _identity(info: CallInfo) -> tuple[int, tuple[int, int], tuple[int, ...]]:
    return info.stop, info.place, info.call


def _delivered(status: int) -> int:
    """Return the signal to go on with after a stop: the stop's own, if it stands before a signal's delivery."""
    return 0 if status >> 16 else os.WSTOPSIG(status)


def _status(tid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{tid}/status").read_text(errors="replace")  # a name may be any bytes
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.split("\n"))}


def _has_ended(tid: int) -> bool:
    return _status(tid).get("State", "X")[0] in "ZX"


def _tracer_of(tid: int) -> int:
    return int(_status(tid).get("TracerPid", "0"))

"""One thread of another process under ptrace(2): seize, stop, call, let go. For the one thread that traces it.

Stops are waited for with a deadline, because a frozen thread never stops. System calls are followed by
PTRACE_SYSCALL, not by single steps: those raise SIGTRAP, which costs a target that ignores it its signal disposition.
Source: ptrace(2), "Stopped states" and "PTRACE_SEIZE".
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.linux.syscall_abi import Abi

CONT, DETACH, SYSCALL = 7, 17, 24
SETOPTIONS, SEIZE, INTERRUPT = 0x4200, 0x4206, 0x4207
GET_SYSCALL_INFO = 0x420E
GETREGSET, SETREGSET, GETSIGMASK, SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
O_TRACESYSGOOD, O_SUSPEND_SECCOMP = 1, 1 << 21
NT_PRSTATUS = 1
EVENT_STOP = 128
CALL_STOP = signal.SIGTRAP | 0x80
WALL = 0x40000000
SIGSET_BYTES = 8  # of the kernel's sigset_t
PAUSE = 0.0002  # between two looks at a thread that is about to stop
GRACE = 1.0  # for getting back a thread whose call has passed its deadline


class InjectionFailed(Exception):
    """The call could not be executed in the target; the target goes on as if nothing had been tried."""


class TracingRefused(InjectionFailed):
    """The kernel does not let us trace the target (another tracer, missing rights, Yama): nothing was changed."""


class TargetEnded(InjectionFailed):
    """The thread, or the whole process, is gone or has ended meanwhile."""


class TargetUnresponsive(InjectionFailed):
    """The target did not stop, or did not finish the call, in time: is it frozen?"""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _CallInfo(ctypes.Structure):
    """What PTRACE_GET_SYSCALL_INFO tells; `words` are number and arguments at an entry, the result at an exit."""

    _fields_ = (
        ("stop", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("architecture", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * 8),
    )


AT_ENTRY, AT_EXIT = 1, 2


class Tracee:
    """A stopped thread. Raises as the classes above say when it cannot be had by `deadline` (time.monotonic).

    It is made to make calls, or, `followed`, stops at its own ones. Without a deadline it need not have stopped yet: of
    many threads, all are told to before `arrive` waits for each.
    """

    def __init__(self, tid: int, abi: Abi, deadline: float | None, *, followed: bool = False) -> None:
        self.tid = tid
        self._abi = abi
        self._followed = followed
        self._own: tuple[list[int], int] | None = None  # its registers and signal mask, while it has ours
        self._running = False
        self._passed = 0  # of the two stops of a call, at its entry and at its exit
        self._seize()
        with self._let_go_on_failure():
            _ptrace()(INTERRUPT, tid, 0, 0)
        if deadline is not None:
            self.arrive(deadline)

    def arrive(self, deadline: float) -> None:
        """Wait until the thread has stopped."""
        with self._let_go_on_failure():
            self._await_event_stop(deadline)
            if not self._followed:
                self._suspend_seccomp()

    def call(self, address: int, number: int, arguments: Sequence[int], deadline: float) -> int:
        """Execute one system call by the instruction at `address`; return its signed result.

        After TargetUnresponsive the call may have been made or not.
        """
        try:
            if self._own is not None:
                self._come_back(deadline)
            registers = self._registers()
            self._own, self._passed = (registers, self._signal_mask()), 0
            self._set_signal_mask(2**64 - 1)
            self._set_registers(self._abi.prepare(registers, address, number, arguments))
            self._pass_through_call(deadline)
            result = self._registers()[self._abi.result]
            self._restore()
        except OSError as error:
            raise self._translated(error) from error
        return ctypes.c_int64(result).value

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
            _ptrace()(DETACH, self.tid, 0, number)
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
        """Return number and arguments of the call at whose entry the thread stands, None at an exit."""
        info = self._call_info()
        return (info.words[0], tuple(info.words[1:7])) if info.stop == AT_ENTRY else None

    def returned(self) -> int:
        """Return the result of the call at whose exit the thread stands; negative is -errno."""
        return ctypes.c_int64(self._call_info().words[0]).value

    def call_here(self, number: int, arguments: Sequence[int], deadline: float) -> int:
        """Do as `call` at the exit of one of the thread's own calls, by the very instruction of that."""
        try:
            address = self._registers()[self._abi.pc] - len(self._abi.instruction)
        except OSError as error:
            raise self._translated(error) from error
        return self.call(address, number, arguments, deadline)

    def change_arguments(self, changed: Mapping[int, int]) -> dict[int, int]:
        """Change arguments, by their index, of the call at which the thread stands; return what they were.

        They have to be put back at the call's exit: a program takes all but the result for unchanged.
        """
        try:
            registers = self._registers()
            before = {index: registers[self._abi.arguments[index]] for index in changed}
            for index, value in changed.items():
                registers[self._abi.arguments[index]] = value % 2**64
            self._set_registers(registers)
        except OSError as error:
            raise self._translated(error) from error
        return before

    def leave(self) -> None:
        """Let go of a thread that stands at a call or is on its way to one, and wait for one deep in the kernel."""
        number = 0
        try:
            if self._running:
                _ptrace()(INTERRUPT, self.tid, 0, 0)
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

    def _call_info(self) -> _CallInfo:
        info = _CallInfo()
        try:
            _ptrace()(GET_SYSCALL_INFO, self.tid, ctypes.sizeof(info), ctypes.addressof(info))
        except OSError as error:
            raise self._translated(error) from error
        return info

    def _seize(self) -> None:
        try:
            _ptrace()(SEIZE, self.tid, 0, O_TRACESYSGOOD)
        except OSError as error:
            raise self._translated(error) from error

    def _suspend_seccomp(self) -> None:
        """A profile of the container may forbid the call to its own processes; needs CAP_SYS_ADMIN, else stays."""
        try:
            _ptrace()(SETOPTIONS, self.tid, 0, O_TRACESYSGOOD | O_SUSPEND_SECCOMP)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise

    def _await_event_stop(self, deadline: float) -> None:
        """Wait for the stop that INTERRUPT asks for; signals that come first are delivered as without a tracer."""
        while (status := self._await_stop(deadline)) >> 16 != EVENT_STOP:
            self._resume(CONT, _delivered(status))

    def _resume(self, request: int, number: int) -> None:
        """Let the thread go on to its next stop, with the signal `number`; 0 for none."""
        _ptrace()(request, self.tid, 0, number)
        self._running = True

    def _pass_through_call(self, deadline: float) -> None:
        """Run from before a call's instruction to behind it.

        SIGSTOP cannot be blocked: it is delivered, and the group stop that follows does not concern a tracee.
        """
        number = 0
        try:
            while self._passed < 2:
                self._resume(SYSCALL, number)
                number = self._count(self._await_stop(deadline))
        except TargetUnresponsive:
            _ptrace()(INTERRUPT, self.tid, 0, 0)
            self._come_back(time.monotonic() + GRACE)
            raise

    def _come_back(self, deadline: float) -> None:
        """Wait until an interrupted thread stands before or behind its call, and give it its registers back."""
        while self._running:
            number = self._count(self._await_stop(deadline))
            if self._passed == 1 or number:
                self._resume(SYSCALL, number)
        self._restore()

    def _count(self, status: int) -> int:
        """Count a stop at a call's entry or exit; return the signal to go on with."""
        if os.WSTOPSIG(status) == CALL_STOP:
            self._passed += 1
            return 0
        return _delivered(status)

    def _restore(self) -> None:
        assert self._own is not None
        registers, mask = self._own
        self._set_registers(registers)
        self._set_signal_mask(mask)
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
        words = (ctypes.c_uint64 * (self._abi.words + 1))()
        vector = _IoVec(ctypes.addressof(words), ctypes.sizeof(words))
        _ptrace()(GETREGSET, self.tid, NT_PRSTATUS, ctypes.addressof(vector))
        if vector.length != self._abi.words * 8:
            raise TracingRefused(f"thread {self.tid} is not a 64-bit one")
        return list(words)[: self._abi.words]

    def _set_registers(self, registers: list[int]) -> None:
        words = (ctypes.c_uint64 * self._abi.words)(*registers)
        vector = _IoVec(ctypes.addressof(words), ctypes.sizeof(words))
        _ptrace()(SETREGSET, self.tid, NT_PRSTATUS, ctypes.addressof(vector))

    def _signal_mask(self) -> int:
        mask = ctypes.c_uint64()
        _ptrace()(GETSIGMASK, self.tid, SIGSET_BYTES, ctypes.addressof(mask))
        return mask.value

    def _set_signal_mask(self, value: int) -> None:
        mask = ctypes.c_uint64(value)
        _ptrace()(SETSIGMASK, self.tid, SIGSET_BYTES, ctypes.addressof(mask))

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


@functools.cache
def _ptrace() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

    def checked(request: int, tid: int, address: int, data: int) -> int:
        ctypes.set_errno(0)
        answer: int = call(request, tid, address, data)
        if answer == -1 and (number := ctypes.get_errno()):
            raise OSError(number, os.strerror(number))
        return answer

    return checked


def _delivered(status: int) -> int:
    """Return the signal to go on with after a stop: the stop's own, if it stands before a signal's delivery."""
    return 0 if status >> 16 else os.WSTOPSIG(status)


def _status(tid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{tid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _has_ended(tid: int) -> bool:
    return _status(tid).get("State", "X")[0] in "ZX"


def _tracer_of(tid: int) -> int:
    return int(_status(tid).get("TracerPid", "0"))

"""System calls executed in another process, by ptrace(2): x86-64 and arm64.

One thread of the target is seized and stopped, made to execute one `syscall` instruction that its own code already
contains, and put back exactly as it was: a call that the stop interrupted is restarted by the kernel. ptrace binds a
tracee to the tracing thread, so everything here happens in the caller's thread, start to end.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import signal
from collections.abc import Callable, Iterator
from types import TracebackType

from kybernate_shim.linux.memory import Region, read_maps

SEIZE, INTERRUPT, DETACH, SINGLESTEP = 0x4206, 0x4207, 17, 9
GETREGSET, SETREGSET, NT_PRSTATUS = 0x4204, 0x4205, 1
O_SUSPEND_SECCOMP = 1 << 21
WALL = 0x40000000
MADV_DONTNEED = 4
PTRACE_EVENT_STOP = 128
LAST_ERRNO = 4095  # results from -4095 to -1 are errors


class InjectionFailed(Exception):
    """The call could not be executed in the target; the target is as it was before."""


class _Machine:
    """What differs between processors: the instruction, the registers of a call, its number."""

    def __init__(
        self,
        words: int,
        instruction: bytes,
        number: int,
        arguments: tuple[int, ...],
        result: int,
        pc: int,
        madvise: int,
    ) -> None:
        self.words = words  # 64-bit words in the kernel's user_regs_struct
        self.instruction = instruction
        self.number = number  # index of the register that holds the call's number
        self.arguments = arguments
        self.result = result
        self.pc = pc
        self.madvise = madvise


_X86_64 = _Machine(27, b"\x0f\x05", 10, (14, 13, 12, 7, 9, 8), 10, 16, 28)  # rax; rdi rsi rdx r10 r8 r9; rax; rip
_X86_64_ORIG_RAX = 15
_ARM64 = _Machine(34, b"\x01\x00\x00\xd4", 8, (0, 1, 2, 3, 4, 5), 0, 32, 233)  # x8; x0 to x5; x0; pc
_MACHINES = {"x86_64": _X86_64, "aarch64": _ARM64}


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _ptrace() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

    def checked(request: int, tid: int, address: int, data: int) -> int:
        ctypes.set_errno(0)
        answer: int = call(request, tid, address, data)
        if answer == -1 and (number := ctypes.get_errno()):
            raise OSError(number, f"ptrace request {request:#x} on {tid}: {os.strerror(number)}")
        return answer

    return checked


def drop_pages(pid: int, start: int, size: int) -> None:
    """Give the pages of a private anonymous range of process `pid` back to the kernel; it then reads as zeros.

    Executes madvise(MADV_DONTNEED) in the target. Raises InjectionFailed; nothing has been dropped then.
    """
    try:
        with Stopped(pid) as target:
            result = target.call(target.machine.madvise, start, size, MADV_DONTNEED)
    except OSError as error:
        raise InjectionFailed(f"process {pid} cannot be traced: {error.strerror}") from error
    if result < 0:
        raise InjectionFailed(f"madvise in process {pid}: {os.strerror(-result)}")


class Stopped:
    """A thread of a process, stopped for as long as the context lasts; the other threads run on."""

    def __init__(self, tid: int) -> None:
        try:
            self.machine = _MACHINES[platform.machine()]
        except KeyError:
            raise InjectionFailed(f"no injection on {platform.machine()}: only x86-64 and arm64 are known") from None
        self._tid = tid
        self._pending: list[int] = []  # signals that arrived meanwhile; delivered on the way out

    def __enter__(self) -> Stopped:
        _ptrace()(SEIZE, self._tid, 0, 0)
        try:
            _ptrace()(INTERRUPT, self._tid, 0, 0)
            self._await_stop()
            self._suspend_seccomp()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()

    def _detach(self) -> None:
        try:
            _ptrace()(DETACH, self._tid, 0, 0)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
        for number in self._pending:
            os.kill(self._tid, number)

    def _suspend_seccomp(self) -> None:
        """A profile of the container may forbid the call to its own processes; needs CAP_SYS_ADMIN, else stays."""
        try:
            _ptrace()(0x4200, self._tid, 0, O_SUSPEND_SECCOMP)
        except OSError:
            pass

    def _await_stop(self) -> int:
        """Wait for the next stop and return its signal. Raises InjectionFailed when the thread has ended."""
        while True:
            try:
                _, status = os.waitpid(self._tid, WALL)
            except InterruptedError:
                continue
            if not os.WIFSTOPPED(status):
                raise InjectionFailed(f"process {self._tid} ended meanwhile")
            return os.WSTOPSIG(status)

    def call(self, number: int, *arguments: int) -> int:
        """Execute one system call and return its result; negative is -errno."""
        saved = self._registers()
        changed = (ctypes.c_uint64 * self.machine.words)(*saved)
        changed[self.machine.pc] = self._find_instruction()
        changed[self.machine.number] = number
        for register, value in zip(self.machine.arguments, arguments, strict=False):
            changed[register] = value
        if self.machine is _X86_64:
            changed[_X86_64_ORIG_RAX] = 2**64 - 1  # not in a call: the kernel must not restart what was interrupted
        self._set_registers(changed)
        try:
            self._step()
            result: int = ctypes.c_int64(self._registers()[self.machine.result]).value
        finally:
            self._set_registers(saved)
        return result

    def _step(self) -> None:
        """Execute one instruction. Signals that come instead of its trap are kept for later."""
        while True:
            _ptrace()(SINGLESTEP, self._tid, 0, 0)
            stop = self._await_stop()
            if stop == signal.SIGTRAP:
                return
            self._pending.append(stop)

    def _registers(self) -> ctypes.Array[ctypes.c_uint64]:
        words = (ctypes.c_uint64 * self.machine.words)()
        vector = _IoVec(ctypes.addressof(words), ctypes.sizeof(words))
        _ptrace()(GETREGSET, self._tid, NT_PRSTATUS, ctypes.addressof(vector))
        return words

    def _set_registers(self, words: ctypes.Array[ctypes.c_uint64]) -> None:
        vector = _IoVec(ctypes.addressof(words), ctypes.sizeof(words))
        _ptrace()(SETREGSET, self._tid, NT_PRSTATUS, ctypes.addressof(vector))

    def _find_instruction(self) -> int:
        for address, code in self._code():
            if (offset := self._aligned_find(code)) >= 0:
                return address + offset
        raise InjectionFailed(f"process {self._tid} has no system call instruction in its code")

    def _aligned_find(self, code: bytes) -> int:
        step = 4 if self.machine is _ARM64 else 1
        offset = code.find(self.machine.instruction)
        while offset >= 0 and offset % step:
            offset = code.find(self.machine.instruction, offset + 1)
        return offset

    def _code(self) -> Iterator[tuple[int, bytes]]:
        """Yield the target's executable memory, the vDSO first: it is small and always there."""
        regions = [region for region in read_maps(self._tid) if "x" in region.perms and region.name != "[vsyscall]"]
        regions.sort(key=lambda region: region.name != "[vdso]")
        fd = os.open(f"/proc/{self._tid}/mem", os.O_RDONLY)
        try:
            for region in regions:
                yield from _pieces(fd, region)
        finally:
            os.close(fd)


def _pieces(fd: int, region: Region, size: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    for address in range(region.start, region.end, size):
        try:
            yield address, os.pread(fd, min(size, region.end - address), address)
        except OSError:
            return

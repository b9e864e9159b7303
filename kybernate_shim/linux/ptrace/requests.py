"""The requests of ptrace(2) for one stopped thread, each with its errno as an OSError.

Sources: ptrace(2); the kernel's user_regset of each architecture for the regsets.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

CONT, DETACH, SYSCALL = 7, 17, 24
SETOPTIONS, SEIZE, INTERRUPT = 0x4200, 0x4206, 0x4207
GET_SYSCALL_INFO = 0x420E
GETREGSET, SETREGSET, GETSIGMASK, SETSIGMASK = 0x4204, 0x4205, 0x420A, 0x420B
O_TRACESYSGOOD, O_EXITKILL, O_SUSPEND_SECCOMP = 1, 1 << 20, 1 << 21
NT_PRSTATUS, NT_ARM_SYSTEM_CALL = 1, 0x404
AT_ENTRY = 1
SIGSET_BYTES = 8  # of the kernel's sigset_t
NO_CALL = -1  # the number at which the kernel executes nothing


class _RegisterVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class CallInfo(ctypes.Structure):
    """The answer of PTRACE_GET_SYSCALL_INFO; `words` are number and arguments at an entry, the result at an exit."""

    _fields_ = (
        ("stop", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("architecture", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * 8),
    )

    @property
    def call(self) -> tuple[int, ...]:
        """Everything that says which call is at its entry: architecture, address behind its instruction, number,
        arguments."""
        return (self.architecture, self.instruction, *self.words[:7])

    @property
    def place(self) -> tuple[int, int]:
        """Instruction and stack pointer, which are the same at the entry and the exit of a call."""
        return self.instruction, self.stack


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


def ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    """Make a request that needs no memory of ours."""
    return _ptrace()(request, tid, address, data)


def call_info(tid: int) -> CallInfo:
    """Return at what call the thread is."""
    info = CallInfo()
    ptrace(GET_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
    return info


def registers(tid: int, most: int) -> list[int]:
    """Return the general registers, as 64-bit words, at most so many."""
    words = (ctypes.c_uint64 * most)()
    vector = _RegisterVec(ctypes.addressof(words), ctypes.sizeof(words))
    ptrace(GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(vector))
    return list(words)[: vector.length // 8]


def set_registers(tid: int, values: list[int]) -> None:
    words = (ctypes.c_uint64 * len(values))(*values)
    vector = _RegisterVec(ctypes.addressof(words), ctypes.sizeof(words))
    ptrace(SETREGSET, tid, NT_PRSTATUS, ctypes.addressof(vector))


def set_arm_call_number(tid: int, number: int) -> None:
    """Change the number of the call at whose entry a thread of arm64 is; its register x8 does not do that."""
    word = ctypes.c_int(number)
    vector = _RegisterVec(ctypes.addressof(word), ctypes.sizeof(word))
    ptrace(SETREGSET, tid, NT_ARM_SYSTEM_CALL, ctypes.addressof(vector))


def signal_mask(tid: int) -> int:
    mask = ctypes.c_uint64()
    ptrace(GETSIGMASK, tid, SIGSET_BYTES, ctypes.addressof(mask))
    return mask.value


def set_signal_mask(tid: int, value: int) -> None:
    mask = ctypes.c_uint64(value)
    ptrace(SETSIGMASK, tid, SIGSET_BYTES, ctypes.addressof(mask))

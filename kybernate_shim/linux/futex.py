"""Waiting for a word of shared memory to change, without a busy loop. Source: futex(2)."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

WAIT, WAKE = 0, 1
ALL = 0x7FFFFFFF
NUMBERS = {"x86_64": 202, "aarch64": 98}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at `address` is `value`, for so many seconds at most; the caller looks again."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    try:
        _call()(ctypes.c_void_p(address), WAIT, ctypes.c_uint32(value), ctypes.byref(limit))
    except (TimeoutError, BlockingIOError, InterruptedError):
        pass  # the time is over, the word had changed before, or a signal came


def wake(address: int) -> None:
    """Wake all that wait for the word at `address`, in any process."""
    _call()(ctypes.c_void_p(address), WAKE, ctypes.c_uint32(ALL), None)


@functools.cache
def _call() -> Callable[..., None]:
    libc = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: it leaves the interpreter lock
    libc.syscall.restype = ctypes.c_long
    number = ctypes.c_long(NUMBERS[os.uname().machine])

    def call(address: object, operation: int, value: object, limit: object) -> None:
        if libc.syscall(number, address, operation, value, limit, None, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return call

"""timerfd_create(2): a descriptor that becomes readable at a time."""

from __future__ import annotations

import os

from kybernate_shim.linux.libc import call


def timer_open() -> int:
    """Return a non-blocking descriptor of a monotonic timer that is not set."""
    clock_monotonic = 1
    return call("timerfd_create", clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC, subject="timer")


def timer_set(fd: int, seconds: float) -> None:
    """Make the timer readable once, in `seconds`; 0 stops it."""
    from struct import pack

    whole = int(seconds)
    call("timerfd_settime", fd, 0, pack("@llll", 0, 0, whole, int((seconds - whole) * 1e9)), None, subject="timer")

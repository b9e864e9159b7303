#!/usr/bin/env python3
"""Compute on a GPU, with a child that inherits the driver's device files and is hard to take them from.

Prints `step N` a step. The first argument names the child: see `CHILDREN`. Needs only the standard library. A test
workload.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import time

CLONE_VM, CLONE_FILES, CLONE_VFORK = 0x100, 0x400, 0x4000
CLONE = {"x86_64": 56, "aarch64": 220}
PTRACE_SEIZE = 0x4206
STACK_BYTES = 64 << 10

libc = ctypes.CDLL(None)
stacks = []


def clone_pausing(flags: int) -> None:
    """Make a child that only waits, on a stack of its own; with CLONE_VFORK, this waits for its end."""
    stacks.append(ctypes.create_string_buffer(STACK_BYTES))
    top = (ctypes.addressof(stacks[-1]) + STACK_BYTES) & ~63
    libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top), flags | signal.SIGCHLD, None)


def fork(child, flags: int = 0) -> int:
    pid = libc.syscall(CLONE[os.uname().machine], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        child()
        while True:
            signal.pause()
    return pid


def shares_memory() -> None:
    clone_pausing(CLONE_VM)


def vforked() -> None:
    threading.Thread(target=clone_pausing, args=(CLONE_VM | CLONE_VFORK,), daemon=True).start()


def shares_descriptors() -> None:
    fork(lambda: None, CLONE_FILES)


def waits_in_vfork() -> None:
    fork(lambda: clone_pausing(CLONE_VM | CLONE_VFORK))


def stopped() -> None:
    fork(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def traced() -> None:
    fork(lambda: libc.ptrace(PTRACE_SEIZE, fork(lambda: None), None, None))


def flees() -> None:
    """The child forks another one and ends, which does the same, and so on."""

    def flee() -> None:
        while os.fork() == 0:
            pass
        os._exit(0)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fork(flee)


def gives_away() -> None:
    """The child is an ordinary one; a process outside, which listens there, is given the same files."""
    fork(lambda: None)
    numbers = [fd for fd in range(3, 64) if is_device(fd)]
    with socket.socket(socket.AF_UNIX) as outside:
        outside.connect(sys.argv[2])
        socket.send_fds(outside, [" ".join(map(str, numbers)).encode()], numbers)


def forks_late() -> None:
    """The child forks one, which forks one itself, as soon as it is told to by a signal."""

    def wait() -> None:
        signal.sigwait([signal.SIGUSR1])
        fork(lambda: fork(lambda: None))

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    fork(wait)


def forked_meanwhile() -> None:
    """The child is forked while the program has a device open once more, as the driver has for a moment."""
    more = os.open(f"/proc/self/fd/{next(fd for fd in range(3, 64) if is_device(fd))}", os.O_RDONLY)
    fork(lambda: None)
    os.close(more)


def is_device(fd: int) -> bool:
    try:
        return stat.S_ISBLK(os.fstat(fd).st_mode)
    except OSError:
        return False


CHILDREN = (
    *(gives_away, shares_memory, vforked, shares_descriptors, waits_in_vfork),
    *(stopped, traced, flees, forks_late, forked_meanwhile),
)


def main() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    for failed in (
        library.cuInit(0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        library.cuCtxSetCurrent(context),
    ):
        if failed:
            sys.exit(f"CUDA failed: {failed}")
    {child.__name__: child for child in CHILDREN}[sys.argv[1]]()
    step = 0
    while True:
        step += 1
        failed = library.cuCtxSynchronize()
        print(f"step {step} checksum 0" if not failed else f"wrong: {failed}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()

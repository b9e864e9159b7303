"""System calls that Python does not wrap, each with its errno as an OSError that names its subject.

Sources: the manual pages of the calls in section 2; numbers of the newer ones from the kernel's generic table, which
x86-64 and arm64 share.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

M_ARENA_MAX = -8


CLONE_FS = 0x200
CLONE_NEWUSER = 0x10000000


_PIDFD_GETFD = 438
_MBIND = {"x86_64": 237, "aarch64": 235}

_Argument = int | bytes | str | None


def use_one_heap() -> None:
    """Let all threads allocate from the same heap: each separate one costs pages that are never returned."""
    import ctypes

    library().mallopt(ctypes.c_int(M_ARENA_MAX), ctypes.c_int(1))


def pidfd_getfd(pid: int, fd: int) -> int:
    """Return a descriptor of ours for what `fd` is in process `pid`. See pidfd_getfd(2)."""
    process = os.pidfd_open(pid)
    try:
        return syscall(_PIDFD_GETFD, process, fd, 0, subject=f"fd {fd} of process {pid}")
    finally:
        os.close(process)


def unshare(flags: int) -> None:
    """Leave the namespaces, or stop sharing the attributes, that `flags` (CLONE_*) names."""
    call("unshare", flags, subject=f"unshare {flags:#x}")


def setns(fd: int, kind: int = 0) -> None:
    """Join the namespace that `fd` stands for; `kind` is its CLONE_NEW* flag, 0 for any."""
    call("setns", fd, kind, subject=f"namespace fd {fd}")


def mbind(address: int, size: int, mode: int, nodes: bytes) -> None:
    """Set where pages of a mapping come from: `mode` is an MPOL_*, `nodes` a mask of them, the lowest byte first."""
    number, bits = _MBIND[os.uname().machine], len(nodes) * 8
    syscall(number, address, size, mode, nodes, bits + 1, 0, subject=f"NUMA policy {mode}")


@cache
def library() -> ctypes.CDLL:
    import ctypes  # here, because the programs that only look at a node never call libc

    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: _Argument, subject: str) -> int:
    return call("syscall", number, *arguments, subject=subject)


def call(function: str, *arguments: _Argument, subject: str) -> int:
    """Call a function of libc that returns -1 on failure.

    Numbers are passed as C longs (a variadic function sees whole registers), strings as NUL-terminated bytes.
    """
    import ctypes

    entry = getattr(library(), function)
    entry.restype = ctypes.c_long if function == "syscall" else ctypes.c_int
    result: int = entry(*[_as_c(argument) for argument in arguments])
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), subject)
    return result


def _as_c(argument: _Argument) -> ctypes.c_long | ctypes.c_char_p:
    import ctypes

    if isinstance(argument, int):
        return ctypes.c_long(argument)
    if isinstance(argument, str):
        argument = os.fsencode(argument)
        if b"\0" in argument:
            raise ValueError(f"NUL byte in {argument!r}")  # C would silently take the part before it
    return ctypes.c_char_p(argument)

"""kcmp(2): whether two processes or threads share memory, descriptors, directories or an open file."""

from __future__ import annotations

import errno
import os

from kybernate_shim.linux.libc import syscall

_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE = 0
_KCMP_VM = 1
_KCMP_FILES = 2
_KCMP_FS = 3


def same_memory(pid: int, other: int) -> bool:
    """Return whether two processes have one address space, see kcmp(2). A machine without that call knows of none."""
    return _same(pid, other, _KCMP_VM)


def same_descriptors(pid: int, other: int) -> bool:
    """Return whether two threads have one table of descriptors, see kcmp(2); else as `same_memory`."""
    return _same(pid, other, _KCMP_FILES)


def same_directories(pid: int, other: int) -> bool:
    """Return whether two threads have one working directory, root and umask, see kcmp(2); else as `same_memory`."""
    return _same(pid, other, _KCMP_FS)


def same_open_file(pid: int, other: int, fd: int) -> bool:
    """Return whether descriptor `fd` of two processes is one open file, as after a fork(2); else as `same_memory`.

    Raises OSError (EBADF) where one of them has no such descriptor.
    """
    return _same(pid, other, _KCMP_FILE, fd)


def _same(pid: int, other: int, what: int, number: int = 0) -> bool:
    call = _KCMP.get(os.uname().machine)
    if call is None:
        return False
    try:
        return syscall(call, pid, other, what, number, number, subject=f"pids {pid} and {other}") == 0
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return False
        raise

"""kcmp(2): what processes and threads share: memory, descriptors, directories, an open file, one that epoll watches."""

from __future__ import annotations

import errno
import os
import struct

from kybernate_shim.linux.libc import syscall

_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE = 0
_KCMP_VM = 1
_KCMP_FILES = 2
_KCMP_FS = 3
_KCMP_EPOLL_TFD = 7


def same_memory(pid: int, other: int) -> bool:
    """Return whether two processes have one address space, see kcmp(2). Always false on a machine without that call."""
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


def same_epoll_target(pid: int, fd: int, other: int, slot: tuple[int, int, int]) -> bool:
    """Return whether descriptor `fd` of a process is what the epoll set of another, or of itself, watches at `slot`.

    A slot is the set's descriptor, the watched one's at the time when it was added, and its place among those that were
    added with the same number. Always true on a machine without that call. Raises FileNotFoundError where the slot is
    gone.
    """
    call = _KCMP.get(os.uname().machine)
    if call is None:
        return True
    try:
        place = struct.pack("=III", *slot)
        return syscall(call, pid, other, _KCMP_EPOLL_TFD, fd, place, subject=f"pids {pid} and {other}") == 0
    except OSError as error:
        if error.errno == errno.EBADF:
            return False
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return True
        raise


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

"""A file of ours mapped into another process, in place of private memory that it has there.

The process has no path to the file: it may be in other namespaces. So it is made, by ptrace, to open a pair of
sockets; we take one end, and hand it the file's descriptor through that. All of it is closed again; what stays is the
mapping. Sources: pidfd_getfd(2), unix(7) "Ancillary messages", cmsg(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kybernate_shim.linux import memory
from kybernate_shim.linux.libc import pidfd_getfd
from kybernate_shim.linux.ptrace import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_READ_WRITE,
    Held,
)
from kybernate_shim.linux.tracee import InjectionFailed

PAGE = 4096
# Where things lie in the page that the process lends us.
PAIR, HEADER, VECTOR, BYTE, CONTROL = 0, 64, 128, 192, 256
HEADER_FORMAT = "=QI4xQQQQI4x"  # struct msghdr: name, iov, control, flags
CONTROL_FORMAT = "=QIIi4x"  # one struct cmsghdr with one descriptor
CONTROL_BYTES = struct.calcsize(CONTROL_FORMAT)


class Lent:
    """Maps files into the process of `held`; made by `lending`. Raises InjectionFailed with everything as it was."""

    def __init__(self, held: Held, page: int, ours: socket.socket, theirs: int) -> None:
        self._held = held
        self._page = page
        self._ours = ours
        self._theirs = theirs

    def map_private(self, fd: int, start: int, size: int, offset: int = 0) -> None:
        """Put a private, writable mapping of our file `fd` in place of what the process has at `start`."""
        abi = self._held.abi
        theirs = self._hand_over(fd)
        try:
            flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
            _checked(self._held.call(abi.mmap, start, size, PROT_READ_WRITE, flags, theirs, offset), "mmap")
        finally:
            self._held.call(abi.close, theirs)

    def give_shareable(self, fd: int) -> int:
        """Give the process our descriptor, and return its number there; the caller closes it.

        What guards the process may forbid it to map the file as shared memory; that is a failure here, and not later.
        """
        abi = self._held.abi
        theirs = self._hand_over(fd)
        try:
            start = self._held.call(abi.mmap, 0, PAGE, PROT_READ_WRITE, MAP_SHARED, theirs, 0)
            _checked(self._held.call(abi.munmap, _checked(start, "mmap"), PAGE), "munmap")
        except BaseException:
            self._held.call(abi.close, theirs)
            raise
        return theirs

    def _hand_over(self, fd: int) -> int:
        """Return the number that our descriptor gets in the process."""
        held, page = self._held, self._page
        socket.send_fds(self._ours, [b"f"], [fd])
        vector = struct.pack("=QQ", page + BYTE, 1)
        header = struct.pack(HEADER_FORMAT, 0, 0, page + VECTOR, 1, page + CONTROL, CONTROL_BYTES, 0)
        _write(held.pid, page + VECTOR, vector)
        _write(held.pid, page + HEADER, header)
        _checked(held.call(held.abi.recvmsg, self._theirs, page + HEADER, socket.MSG_CMSG_CLOEXEC), "recvmsg")
        length, level, kind, number = struct.unpack(CONTROL_FORMAT, _read(held.pid, page + CONTROL, CONTROL_BYTES))
        if (length, level, kind) != (20, socket.SOL_SOCKET, socket.SCM_RIGHTS):
            raise InjectionFailed(f"process {held.pid} took no descriptor: is its limit of open files reached?")
        return int(number)


@contextmanager
def lending(held: Held) -> Iterator[Lent]:
    """Have the process of `held` take part for as long as the body runs. Raises InjectionFailed."""
    abi = held.abi
    with ExitStack() as undo:

        def call(name: str, number: int, *arguments: int) -> int:
            return _checked(held.call(number, *arguments), name)

        flags = MAP_PRIVATE | MAP_ANONYMOUS
        page = call("mmap", abi.mmap, 0, PAGE, PROT_READ_WRITE, flags, -1, 0)
        undo.callback(held.call, abi.munmap, page, PAGE)
        call("socketpair", abi.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC, 0, page + PAIR)
        near, far = struct.unpack("=ii", _read(held.pid, page + PAIR, 8))
        undo.callback(held.call, abi.close, far)
        undo.callback(held.call, abi.close, near)
        try:
            ours = socket.socket(fileno=pidfd_getfd(held.pid, near))
        except OSError as error:
            raise InjectionFailed(f"a descriptor of process {held.pid} cannot be had: {error.strerror}") from error
        undo.enter_context(ours)
        yield Lent(held, page, ours, far)


def _checked(result: int, name: str) -> int:
    if -4096 < result < 0:
        word = errno.errorcode.get(-result, str(-result))
        raise InjectionFailed(f"{name} in the process failed: {os.strerror(-result)} ({word})")
    return result


def _read(pid: int, address: int, size: int) -> bytes:
    return _with_buffer(size, lambda buffer: memory.read_into(pid, address, buffer, size))


def _write(pid: int, address: int, data: bytes) -> None:
    _with_buffer(len(data), lambda buffer: memory.write_from(pid, address, buffer, len(data)), data)


def _with_buffer(size: int, work: Callable[[int], None], data: bytes = b"") -> bytes:
    buffer = (ctypes.c_char * size).from_buffer_copy(data or bytes(size))
    try:
        work(ctypes.addressof(buffer))
    except (OSError, memory.ShortCopy) as error:
        raise InjectionFailed(f"the memory that the process lent cannot be used: {error}") from error
    return bytes(buffer.raw)

"""A file of ours mapped into another process, in place of private memory that it has there.

The process has no path to the file: it may be in other namespaces. So it is made, by ptrace, to open a pair of sockets;
we take one end, and hand it the file's descriptor through that. All of it is closed again; what stays is the mapping.
Other threads of the process may change the content of that page: no step waits for them, and the descriptor is compared
with ours. The process may keep it: map no more than the process may keep.
Sources: pidfd_getfd(2), unix(7) "Ancillary messages", cmsg(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kybernate_shim.linux import process_memory
from kybernate_shim.linux.libc import pidfd_getfd
from kybernate_shim.linux.ptrace.seized import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_READ_WRITE,
    SeizedProcess,
)
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.linux.statx import status_at, status_of

PAGE = 4096
# Where things lie in the page that is mapped in the process.
PAIR, HEADER, VECTOR, BYTE, CONTROL = 0, 64, 128, 192, 256
HEADER_FORMAT = "=QI4xQQQQI4x"  # struct msghdr: name, iov, control, flags
CONTROL_FORMAT = "=QIIi4x"  # one struct cmsghdr with one descriptor
CONTROL_BYTES = struct.calcsize(CONTROL_FORMAT)


class RemotePage:
    """Maps files into the process of `held`; made by `lending`. Raises InjectionFailed with everything as it was."""

    def __init__(self, held: SeizedProcess, page: int, ours: socket.socket, theirs: int) -> None:
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

        A security policy may forbid the process to map the file as shared memory; that fails here, and not later.
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
        try:
            socket.send_fds(self._ours, [b"f"], [fd])
        except OSError as error:
            raise InjectionFailed(f"the socket of process {held.pid} takes no descriptor: {error.strerror}") from error
        vector = struct.pack("=QQ", page + BYTE, 1)
        header = struct.pack(HEADER_FORMAT, 0, 0, page + VECTOR, 1, page + CONTROL, CONTROL_BYTES, 0)
        _write(held.pid, page + VECTOR, vector)
        _write(held.pid, page + HEADER, header)
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        _checked(held.call(held.abi.recvmsg, self._theirs, page + HEADER, flags), "recvmsg")
        length, level, kind, number = struct.unpack(CONTROL_FORMAT, _read(held.pid, page + CONTROL, CONTROL_BYTES))
        if (length, level, kind) != (20, socket.SOL_SOCKET, socket.SCM_RIGHTS):
            raise InjectionFailed(f"process {held.pid} took no descriptor: is its limit of open files reached?")
        if not _is_same_file(held.pid, number, fd):
            raise InjectionFailed(f"descriptor {number} of process {held.pid} is not the one that it was given")
        return int(number)


@contextmanager
def remote_page(held: SeizedProcess) -> Iterator[RemotePage]:
    """Prepare the process of `held` for this, for as long as the body runs. Raises InjectionFailed."""
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
        ours = undo.enter_context(_taken_socket(held.pid, near))
        yield RemotePage(held, page, ours, far)


def _taken_socket(pid: int, number: int) -> socket.socket:
    """Return one end of the pair that a process has; it never waits. Raises InjectionFailed."""
    try:
        fd = pidfd_getfd(pid, number)
    except OSError as error:
        raise InjectionFailed(f"a descriptor of process {pid} cannot be duplicated: {error.strerror}") from error
    try:
        ours = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise InjectionFailed(f"descriptor {number} of process {pid} is not a socket") from error
    if (ours.family, ours.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        ours.close()
        raise InjectionFailed(f"descriptor {number} of process {pid} is not the socket that it opened")
    ours.setblocking(False)
    return ours


def _is_same_file(pid: int, number: int, fd: int) -> bool:
    try:
        return status_of(f"/proc/{pid}/fd/{number}").is_same(status_at(fd))
    except OSError:
        return False


def _checked(result: int, name: str) -> int:
    if -4096 < result < 0:
        word = errno.errorcode.get(-result, str(-result))
        raise InjectionFailed(f"{name} in the process failed: {os.strerror(-result)} ({word})")
    return result


def _read(pid: int, address: int, size: int) -> bytes:
    return _with_buffer(size, lambda buffer: process_memory.read_into(pid, address, buffer, size))


def _write(pid: int, address: int, data: bytes) -> None:
    _with_buffer(len(data), lambda buffer: process_memory.write_from(pid, address, buffer, len(data)), data)


def _with_buffer(size: int, work: Callable[[int], None], data: bytes = b"") -> bytes:
    buffer = (ctypes.c_char * size).from_buffer_copy(data or bytes(size))
    try:
        work(ctypes.addressof(buffer))
    except (OSError, process_memory.ShortCopy) as error:
        raise InjectionFailed(f"the page that was mapped in the process cannot be used: {error}") from error
    return bytes(buffer.raw)

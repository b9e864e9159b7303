"""Another process's memory: its map, and copies in and out of it by process_vm_readv(2) and process_vm_writev(2).

The copies run without the interpreter lock (ctypes releases it around foreign calls), so threads make them parallel.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NamedTuple

from kybernate_shim.linux.kernel_text import text_of

MOST_VECTORS = 1024  # of one call: the kernel's UIO_MAXIOV


class Region(NamedTuple):
    """One line of /proc/PID/maps: addresses in bytes, `perms` such as "rw-p", `name` empty for anonymous memory.

    `inode` is 0 for what is of no file, else one of the filesystem on `device`, as os.stat numbers it.
    """

    start: int
    end: int
    perms: str
    inode: int
    name: str
    device: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def private_anonymous(self) -> bool:
        """Whether it is the process's own writable memory; a name given by prctl (PR_SET_VMA) changes nothing."""
        unnamed = not self.name or self.name.startswith("[anon:")
        return self.perms.startswith("rw") and self.perms.endswith("p") and self.inode == 0 and unnamed


class ShortCopy(Exception):
    """The kernel copied less than asked: the range is not mapped any more, or the process has ended."""


def parse_maps(text: str) -> list[Region]:
    """Read the text of /proc/PID/maps, in order of address.

    Names of files are any bytes but a line's end, which the kernel escapes; other separators do not end a line.
    """
    regions = []
    for line in text.split("\n"):
        if not line:
            continue
        span, perms, _offset, device, inode, *name = line.split(None, 5)
        start, _, end = span.partition("-")
        major, _, minor = device.partition(":")
        number = os.makedev(int(major, 16), int(minor, 16))
        regions.append(Region(int(start, 16), int(end, 16), perms, int(inode), name[0] if name else "", number))
    return regions


def read_maps(pid: int) -> list[Region]:
    """Read the map of process `pid`; a zombie's is empty. Raises OSError (ENOENT, ESRCH, EACCES)."""
    return parse_maps(text_of(f"/proc/{pid}/maps"))


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_IoVec)
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(library, name)
        call.restype = ctypes.c_ssize_t
        call.argtypes = (ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong)
    return library


def read_into(pid: int, address: int, buffer: int, size: int) -> None:
    """Copy `size` bytes at `address` of process `pid` to our own address `buffer`.

    Raises ShortCopy when part of the range is not there, OSError (EPERM, ESRCH) when the process cannot be read.
    """
    _copy("process_vm_readv", pid, address, buffer, size)


def write_from(pid: int, address: int, buffer: int, size: int) -> None:
    """Copy `size` bytes at our own address `buffer` to `address` of process `pid`. Raises as read_into."""
    _copy("process_vm_writev", pid, address, buffer, size)


def touch(pid: int, start: int, end: int, step: int) -> None:
    """Have the kernel make the pages of a range of another process, by writing a zero into each `step` bytes.

    `step` is the size of a page, a power of two. For memory that is not in use yet. Raises as write_from.
    """
    zeros = ctypes.create_string_buffer(MOST_VECTORS)
    addresses = [max(start, address) for address in range(start - start % step, end, step)]
    call = _libc().process_vm_writev
    for first in range(0, len(addresses), MOST_VECTORS):
        some = addresses[first : first + MOST_VECTORS]
        theirs = (_IoVec * len(some))(*(_IoVec(address, 1) for address in some))
        ours = _IoVec(ctypes.addressof(zeros), len(some))
        copied = call(pid, ctypes.byref(ours), 1, theirs, len(some), 0)
        if copied < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_writev of process {pid} at {some[0]:#x}: {os.strerror(number)}")
        if copied < len(some):
            raise ShortCopy(f"process {pid}: {copied} of {len(some)} pages from {some[0]:#x} on")


def _copy(name: str, pid: int, address: int, buffer: int, size: int) -> None:
    call = getattr(_libc(), name)
    done = 0
    while done < size:
        ours, theirs = _IoVec(buffer + done, size - done), _IoVec(address + done, size - done)
        copied = call(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if copied < 0:
            number = ctypes.get_errno()
            if done:
                raise ShortCopy(f"process {pid}: {done} of {size} bytes at {address:#x}: {os.strerror(number)}")
            raise OSError(number, f"{name} of process {pid} at {address:#x}: {os.strerror(number)}")
        if copied == 0:
            raise ShortCopy(f"process {pid}: {done} of {size} bytes at {address:#x}")
        done += copied

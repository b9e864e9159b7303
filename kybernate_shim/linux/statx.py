"""What the kernel knows of a file by itself: statx(2) with AT_STATX_DONT_SYNC.

stat(2) asks the server of a filesystem such as FUSE or NFS, and waits without limit where that does not answer. The
kind of a file, of which device it is, and its number never change, so the kernel need not ask.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kybernate_shim.linux import libc

if TYPE_CHECKING:
    import ctypes

AT_FDCWD: Final = -100
AT_STATX_DONT_SYNC: Final = 0x4000
AT_EMPTY_PATH: Final = 0x1000
WANTED: Final = 0x107  # type, mode, number of links, inode
BYTES: Final = 256  # struct statx
NLINK_AT: Final = 16
MODE_AT: Final = 28
INODE_AT: Final = 32
RDEV_AT: Final = 128
DEV_AT: Final = 136


class FileStatus(NamedTuple):
    """What is known of a file, by the names of os.stat_result. `st_nlink` is what its server last reported."""

    st_mode: int
    st_nlink: int
    st_dev: int
    st_ino: int
    st_rdev: int

    def is_same(self, other: FileStatus) -> bool:
        """Return whether both are of one file."""
        return (self.st_dev, self.st_ino) == (other.st_dev, other.st_ino)


def status_of(path: str) -> FileStatus:
    """Return what is known of the file that `path` leads to, without a question to its server. Raises OSError."""
    return _status(AT_FDCWD, path, 0)


def status_at(fd: int) -> FileStatus:
    """Return what is known of an open file, without a question to its server. Raises OSError."""
    return _status(fd, "", AT_EMPTY_PATH)


def _status(directory: int, path: str, flags: int) -> FileStatus:
    import ctypes  # here, as in libc.py

    found = ctypes.create_string_buffer(BYTES)
    if _statx()(directory, os.fsencode(path), AT_STATX_DONT_SYNC | flags, WANTED, found):
        raise OSError(number := ctypes.get_errno(), os.strerror(number), path)
    (links,), (mode,) = struct.unpack_from("=I", found, NLINK_AT), struct.unpack_from("=H", found, MODE_AT)
    (inode,) = struct.unpack_from("=Q", found, INODE_AT)
    device, special = (os.makedev(*struct.unpack_from("=II", found, at)) for at in (DEV_AT, RDEV_AT))
    return FileStatus(mode, links, device, inode, special)


@cache
def _statx() -> ctypes._NamedFuncPointer:
    """Return the function with the types of its arguments: that speeds up thousands of calls."""
    import ctypes

    function = libc.library().statx
    function.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    return function

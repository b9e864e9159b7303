"""What the kernel knows of a file by itself: statx(2) with AT_STATX_DONT_SYNC.

stat(2) asks the server of a filesystem such as FUSE or NFS, and waits without limit where that does not answer. The
kind of a file, and of which device it is, never change, so the kernel need not ask.
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
TYPE_AND_MODE: Final = 0x3
BYTES: Final = 256  # struct statx
MODE_AT: Final = 28
RDEV_AT: Final = 128


class FileKind(NamedTuple):
    """The mode of a file with its type, and the number of the device that it stands for."""

    mode: int
    device: int


def kind_of(path: str) -> FileKind:
    """Return what kind of file `path` leads to, without a question to the server of its filesystem. Raises OSError."""
    import ctypes  # here, as in libc.py

    found = ctypes.create_string_buffer(BYTES)
    if _statx()(AT_FDCWD, os.fsencode(path), AT_STATX_DONT_SYNC, TYPE_AND_MODE, found):
        raise OSError(number := ctypes.get_errno(), os.strerror(number), path)
    (mode,) = struct.unpack_from("=H", found, MODE_AT)
    return FileKind(mode, os.makedev(*struct.unpack_from("=II", found, RDEV_AT)))


@cache
def _statx() -> ctypes._NamedFuncPointer:
    """Return the function with the types of its arguments: thousands of calls convert faster so."""
    import ctypes

    function = libc.library().statx
    function.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    return function

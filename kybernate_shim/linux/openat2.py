"""openat2(2): paths that are opened by rules, such as below a directory and without links."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from kybernate_shim.linux import libc

if TYPE_CHECKING:
    import ctypes

RESOLVE_NO_XDEV = 0x1
RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8
RESOLVE_IN_ROOT = 0x10
_OPENAT2 = 437


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open `path` as a process would whose root directory is the descriptor `root`: no symlink leads out of it."""
    return openat2(root, path, flags, RESOLVE_IN_ROOT)


def openat2(directory: int, path: str, flags: int, resolve: int) -> int:
    """Open `path` below a directory, resolved by the rules of `resolve` (RESOLVE_*)."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"NUL byte in {name!r}")  # C would silently take the part before it
    how = _how(flags | os.O_CLOEXEC, resolve)
    fd: int = _function()(_OPENAT2, directory, name, how, len(how))
    if fd == -1:
        import ctypes  # here, as in libc.py

        raise OSError(number := ctypes.get_errno(), os.strerror(number), path)
    return fd


@cache
def _how(flags: int, resolve: int) -> bytes:
    from struct import pack

    return pack("=QQQ", flags, 0, resolve)


@cache
def _function() -> ctypes._NamedFuncPointer:
    """Return syscall(2) with the types of these arguments: that speeds up thousands of calls."""
    import ctypes

    function = libc.library()["syscall"]  # by an index: a function of its own, whose types no other caller sees
    function.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long
    function.restype = ctypes.c_long
    return function

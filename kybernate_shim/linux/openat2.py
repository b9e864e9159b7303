"""openat2(2): paths that are opened by rules, such as below a directory and without links."""

from __future__ import annotations

import os

from kybernate_shim.linux.libc import syscall

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
    from struct import pack

    how = pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return syscall(_OPENAT2, directory, path, how, len(how), subject=path)

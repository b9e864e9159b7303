"""The system calls behind namespaces and mounts, which Python 3.11 does not wrap."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 4096, 16384, 1 << 18, 1 << 20
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1


def _call(name: str, *args: bytes | int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args)) == -1:
        number = ctypes.get_errno()
        shown = ", ".join(arg.decode() if isinstance(arg, bytes) else str(arg) for arg in args)
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def mount(source: str | Path, target: str | Path, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """Mount `source` on `target`. Source: mount(2)."""
    _call("mount", os.fsencode(source), os.fsencode(target), fstype.encode() or None, flags, data.encode() or None)


def umount(target: str | Path, flags: int = 0) -> None:
    """Unmount `target`. Source: umount2(2)."""
    _call("umount2", os.fsencode(target), flags)


def pivot_root(root: Path) -> None:
    """Make `root`, a mount point, the root of this mount namespace and drop the old root. Source: pivot_root(2)."""
    os.chdir(root)
    _call("pivot_root", b".", b".")
    umount(".", MNT_DETACH)
    os.chdir("/")


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags` for new ones. Source: unshare(2)."""
    _call("unshare", flags)


def die_with_parent(signal: int) -> None:
    """Let the kernel send `signal` to this process when the thread that forked it ends. Source: prctl(2)."""
    _call("prctl", PR_SET_PDEATHSIG, signal, 0, 0, 0)

"""The system calls that mount: the old ones by path, and the newer ones by file descriptor.

Sources: mount(2), umount(2), open_tree(2), move_mount(2), fsopen(2), mount_setattr(2).
"""

from __future__ import annotations

import os

from kybernate_shim.linux.libc import call, syscall

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_REMOUNT = 32
MS_MANDLOCK = 64
MS_DIRSYNC = 128
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_IDMAP = 0x100000

_OPEN_TREE = 428
_MOVE_MOUNT = 429
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_MOUNT_SETATTR = 442


def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raises OSError that names `target`; the kernel cuts `data` silently at a page's end."""
    call("mount", source, target, fstype, flags, data or None, subject=target)


def umount(target: str, flags: int = 0) -> None:
    """Call umount2(2). Raises OSError that names `target`."""
    call("umount2", target, flags, subject=target)


def open_tree(directory: int, path: str, flags: int) -> int:
    """Return a descriptor of the mount at `path`, of a detached copy with OPEN_TREE_CLONE."""
    return syscall(_OPEN_TREE, directory, path, flags, subject=path)


def move_mount(source: int, source_path: str, target: int, target_path: str, flags: int) -> None:
    """Attach the mount at (`source`, `source_path`) to (`target`, `target_path`)."""
    syscall(_MOVE_MOUNT, source, source_path, target, target_path, flags, subject=target_path)


def mount_setattr(directory: int, path: str, flags: int, *, attributes: int, userns: int = 0) -> None:
    """Set attributes (MOUNT_ATTR_*) of a mount; `userns` is a descriptor, for MOUNT_ATTR_IDMAP."""
    from struct import pack

    change = pack("=QQQQ", attributes, 0, 0, userns)  # set, clear, propagation, user namespace
    syscall(_MOUNT_SETATTR, directory, path, flags, change, len(change), subject=path or f"fd {directory}")


def fsopen(fstype: str, flags: int = FSOPEN_CLOEXEC) -> int:
    """Return a descriptor of a new filesystem context of `fstype`; reading it gives the kernel's messages."""
    return syscall(_FSOPEN, fstype, flags, subject=fstype)


def fsconfig(context: int, command: int, key: str | None = None, value: str | None = None) -> None:
    """Give a filesystem context one option, or a command; the kernel takes values of at most 255 bytes."""
    syscall(_FSCONFIG, context, command, key, value, 0, subject=f"{key or 'create'}={value or ''}")


def fsmount(context: int, flags: int = FSMOUNT_CLOEXEC, attributes: int = 0) -> int:
    """Return a descriptor of a detached mount of the filesystem that the context has created."""
    return syscall(_FSMOUNT, context, flags, attributes, subject=f"fd {context}")

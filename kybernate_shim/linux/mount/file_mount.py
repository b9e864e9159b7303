"""A mount of one file, attached nowhere, through which the file is opened for another process.

A descriptor that a process has can be opened again by way of /proc/PID/fd, with all rights of the file's owner: in a
container, root is the owner of our files. It cannot do more than its mount allows, and that can be revoked later: a
mount becomes read-only if nothing is open for writing through it, wherever the descriptor is, also on its way through a
socket, or only mapped.
Sources: open_tree(2), mount_setattr(2), proc(5), fcntl(2) "Leases".
"""

from __future__ import annotations

import errno
import fcntl
import os
from types import TracebackType

from kybernate_shim.linux.mount import syscalls

ALWAYS = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC


class FileMount:
    """The mount of the file that is open as `fd`. Raises OSError, also where the kernel has no such mounts."""

    def __init__(self, fd: int, *, read_only: bool = False) -> None:
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH
        self._fd = syscalls.open_tree(fd, "", flags)
        try:
            self._set(ALWAYS | (syscalls.MOUNT_ATTR_RDONLY if read_only else 0))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FileMount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, flags: int) -> int:
        """Return a new descriptor of the file."""
        return os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC)

    def end_writing(self) -> bool:
        """Prevent further opens for writing through the mount; return False where something is still open."""
        try:
            self._set(syscalls.MOUNT_ATTR_RDONLY)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the mount; it stays as it is for what is open through it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _set(self, attributes: int) -> None:
        syscalls.mount_setattr(self._fd, "", syscalls.AT_EMPTY_PATH, attributes=attributes)


def only_open_here(fd: int) -> bool:
    """Return whether the file, open for writing as `fd`, is open nowhere else; false where the kernel cannot report it.

    Mappings count, and descriptors within sockets; those of O_PATH do not.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True

"""Makes device nodes in the /dev of a running container, whose processes may change every name there meanwhile.

The container's root is opened once, a name is resolved below it without following any link, and it counts only if it
lies in the filesystem that is mounted at /dev: a device node anywhere else might be on a volume of the host's. What is
there already stays as it is. Sources: openat2(2); proc(5), /proc/pid/fdinfo and /proc/pid/mountinfo.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from kybernate_shim.linux import openat2
from kybernate_shim.linux.plain_files import LOOK

DIRECTORY = os.O_PATH | os.O_DIRECTORY
WITHOUT_LINKS = openat2.RESOLVE_IN_ROOT | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
OF_DEVICES = ("tmpfs", "devtmpfs")  # what runtimes mount at /dev


def not_in_dev(path: str, why: str) -> OSError:
    """Return the error: the directory for a device node is not in the container's own /dev."""
    return OSError(errno.EXDEV, why, path)


def make_char_device(pid: int, path: str, device: int) -> bool:
    """Make the node `path` of a character device in the container of process `pid`, which all users may read and write.

    `path` is absolute, as the container sees it; `device` is from os.makedev. Return False where something of that name
    is there already, whatever it is. Raises OSError; nothing was made then.
    """
    where = PurePosixPath(path)
    with (
        _opened(os.open(f"/proc/{pid}/root", DIRECTORY | os.O_CLOEXEC)) as root,
        _opened(_resolved(root, str(where.parent))) as parent,
        _opened(_resolved(root, "/dev")) as dev,
    ):
        _require_dev(pid, path, parent, dev)
        try:
            os.mknod(where.name, stat.S_IFCHR | 0o666, device, dir_fd=parent)
        except FileExistsError:
            return False
        _open_to_all(parent, path, where.name, device)
    return True


def _resolved(root: int, path: str) -> int:
    try:
        return openat2.openat2(root, path, DIRECTORY, WITHOUT_LINKS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise not_in_dev(path, "a link or a file is in the place of a directory") from error
        raise


def _require_dev(pid: int, path: str, parent: int, dev: int) -> None:
    mount = _mount_of(dev)
    if _mount_of(parent) != mount:
        raise not_in_dev(path, "not in the filesystem that is mounted at /dev")
    with open(f"/proc/{pid}/mountinfo", "rb") as table:  # noqa: PTH123  # by lines, of which there may be many
        for line in table:
            fields = line.split()
            if int(fields[0]) == mount:
                kind = fields[fields.index(b"-") + 1].decode(errors="replace")
                if fields[3:5] == [b"/", b"/dev"] and kind in OF_DEVICES:
                    return
                raise not_in_dev(path, f"/dev is not a filesystem of the container's own, but a {kind}")
    raise not_in_dev(path, "nothing is mounted at /dev")


def _open_to_all(parent: int, path: str, name: str, device: int) -> None:
    """Set the mode of what was just made, whatever the umask is, and of nothing that has replaced it."""
    with _opened(os.open(name, LOOK, dir_fd=parent)) as made:
        status = os.fstat(made)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != device:
            raise not_in_dev(path, "the device node was replaced as soon as it was made")
        os.chmod(f"/proc/self/fd/{made}", 0o666)  # noqa: PTH101  # a descriptor by O_PATH has no fchmod


def _mount_of(fd: int) -> int:
    """Return the id of the mount that a descriptor lies in."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:  # noqa: PTH123
        return next(int(line.split()[1]) for line in info if line.startswith("mnt_id:"))


@contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)

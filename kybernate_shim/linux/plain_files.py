"""Opens and reads regular files in directories that others may have written to.

A FIFO would block the reader without end, a device node acts when it is opened, a link leads elsewhere, and a sparse
file claims any size. So a file is looked at through a descriptor that opens nothing yet, and is refused unless it is a
regular file of an expected size. Sources: open(2), O_PATH; proc(5), /proc/self/fd.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # to open others below it
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
CHUNK = 1 << 20


class NotPlain(OSError):
    """The name is not one of a regular file: a link, a FIFO, a device, a directory."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", name)


def too_large(name: str, most: int) -> OSError:
    """Return the error: the file has more bytes than its reader accepts."""
    return OSError(errno.EFBIG, f"larger than {most} bytes", name)


def open_plain(path: str | Path, *, directory: int | None = None, most: int | None = None, flags: int = READ) -> int:
    """Return a close-on-exec descriptor of the regular file `path`, below the open `directory` if one is given.

    The last part of the name is not followed if it is a link. `most` is in bytes, None for any size. `flags` are for
    open(2). Raises NotPlain and other OSErrors; nothing was opened for reading or writing then.
    """
    name = os.fspath(path)
    look = os.open(name, LOOK, dir_fd=directory)
    try:
        status = os.fstat(look)
        if not stat.S_ISREG(status.st_mode):
            raise NotPlain(name)
        if most is not None and status.st_size > most:
            raise too_large(name, most)
        return os.open(f"/proc/self/fd/{look}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(look)


def read_plain(path: str | Path, *, directory: int | None = None, most: int) -> bytes:
    """Return the content of the regular file `path`, of at most `most` bytes, also if it grows meanwhile.

    Raises NotPlain and other OSErrors.
    """
    fd = open_plain(path, directory=directory, most=most)
    try:
        parts, left = [], most
        while part := os.read(fd, min(CHUNK, left + 1)):
            left -= len(part)
            if left < 0:
                raise too_large(os.fspath(path), most)
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)

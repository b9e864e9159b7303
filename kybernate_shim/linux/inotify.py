"""inotify(7): a descriptor that becomes readable when a file changes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress

from kybernate_shim.linux.libc import call

IN_ACCESS, IN_MODIFY = 1, 2
LOST = -1  # instead of a watch: more events have happened than the kernel keeps
MOST_READ = 1 << 16
EVENT = struct.Struct("iIII")  # and a name, whose length in bytes is the last word


def instance() -> int:
    """Return a non-blocking inotify descriptor that watches nothing yet. Raises OSError."""
    return call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC, subject="inotify")


def watch(fd: int, path: str, mask: int) -> int:
    """Have a descriptor watch the file `path` as well, and return the watch. Raises OSError."""
    return call("inotify_add_watch", fd, path, mask, subject=path)


def unwatch(fd: int, watched: int) -> None:
    """End a watch, which has ended already where its file is gone."""
    with suppress(OSError):
        call("inotify_rm_watch", fd, watched, subject=f"inotify watch {watched}")


def happened(fd: int) -> Iterator[int]:
    """Yield the watch of each event until now; LOST where some were dropped."""
    while True:
        try:
            text = os.read(fd, MOST_READ)
        except BlockingIOError:
            return
        place = 0
        while place < len(text):
            watched, _, _, length = EVENT.unpack_from(text, place)
            yield watched
            place += EVENT.size + length


def inotify_watch(path: str, mask: int) -> int:
    """Return a non-blocking inotify descriptor that watches the one file `path`."""
    fd = instance()
    try:
        watch(fd, path, mask)
    except OSError:
        os.close(fd)
        raise
    return fd

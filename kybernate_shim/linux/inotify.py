"""inotify(7): a descriptor that becomes readable when a file changes."""

from __future__ import annotations

import os

from kybernate_shim.linux.libc import call

IN_MODIFY = 2


def inotify_watch(path: str, mask: int) -> int:
    """Return a non-blocking inotify descriptor that watches the one file `path`."""
    fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC, subject="inotify")
    try:
        call("inotify_add_watch", fd, path, mask, subject=path)
    except OSError:
        os.close(fd)
        raise
    return fd

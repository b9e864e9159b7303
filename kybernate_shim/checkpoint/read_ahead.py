"""Reads files that are about to be copied while a container is frozen, so that no copy waits for a disk then.

Copying them before the freeze, and while it lasts only what has changed since, would be shorter still, but what has
changed cannot be known: a program that writes by a mapping changes neither size nor times of a file as long as its page
tables let it write, and on a tmpfs never. Source: the kernel's file_update_time, called by page_mkwrite.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.tree_tar import data_of
from kybernate_shim.linux.beneath import TreeFile, closing, open_top, walk
from kybernate_shim.linux.mount.mountinfo import IN_MEMORY, mount_at

CHUNK: Final = 1 << 20


def read_ahead(
    directory: Path,
    most: int,
    *,
    skip: Callable[[str], bool] = lambda name: False,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Read the files below a directory that is not in memory, `most` bytes of them, and return how many all have.

    Holes aside. Programs change the files meanwhile. `skip` and `check` are as for `walk`. Raises OSError.
    """
    seen: set[tuple[int, int]] = set()
    buffer = memoryview(bytearray(CHUNK))
    mount = mount_at(directory)
    found_bytes, unread = 0, 0 if mount is not None and mount.type in IN_MEMORY else most
    with closing(open_top(directory)) as top:
        for found in walk(top, skip=skip, check=check, changing=True):
            if not _is_new(found, seen):
                continue
            for offset, length in data_of(found.fd, found.status.st_size):
                found_bytes += length
                unread -= _read(found.fd, offset, min(length, unread), buffer, check)
    return found_bytes


def _is_new(found: TreeFile, seen: set[tuple[int, int]]) -> bool:
    """Return whether it is a regular file that was not found before under another name."""
    if not stat.S_ISREG(found.status.st_mode):
        return False
    if found.status.st_nlink > 1:
        key = (found.status.st_dev, found.status.st_ino)
        if key in seen:
            return False
        seen.add(key)
    return True


def _read(fd: int, offset: int, length: int, buffer: memoryview, check: Callable[[], None]) -> int:
    done = 0
    while done < length:
        check()
        count = os.preadv(fd, [buffer[: length - done]], offset + done)
        if not count:
            break  # it is shorter by now
        done += count
    return done

"""Restores that are frozen in their middle, for as long as a test needs: the kernel asks before CRIU may read pages.

fanotify(7): a process that opens or reads a marked file waits until the listener has answered, or it is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from tests.system.checkpoints import in_background

T = TypeVar("T")

CLASS_CONTENT, CLOEXEC = 0x04, 0x01
MARK_ADD = 0x01
ACCESS_PERM = 0x20000
ALLOW = 0x01
EVENT = struct.Struct("=IBBHQii")  # its length, three fields for others, the mask, the file, the process
ANSWER = struct.Struct("=iI")
SECONDS = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def held_restore(image: Path, restore: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `restore` in a thread; the block begins when CRIU asks for the image's memory, which it gets at its end."""
    listener = _checked(_libc.fanotify_init(CLASS_CONTENT | CLOEXEC, os.O_RDONLY))
    for pages in image.rglob("pages-*.img"):
        _checked(_libc.fanotify_mark(listener, MARK_ADD, ctypes.c_uint64(ACCESS_PERM), -1, os.fsencode(pages)))
    with ExitStack() as ending:
        done = ending.enter_context(in_background(restore))
        ending.callback(os.close, listener)  # which lets all readers continue
        ending.callback(os.close, _asked_by_criu(listener, done))
        yield done


def _asked_by_criu(listener: int, restore: Future[T]) -> int:
    """Wait until CRIU asks, and return the file; others, as what compares digests, read on meanwhile."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not restore.done():
        if not select.select([listener], [], [], 0.1)[0]:
            continue
        events = os.read(listener, EVENT.size)  # one: there is no room for more
        *_, file, pid = EVENT.unpack(events)
        if Path(f"/proc/{pid}/comm").read_text().strip() == "criu":
            return int(file)
        os.write(listener, ANSWER.pack(file, ALLOW))
        os.close(file)
    raise AssertionError(f"CRIU has not read the memory; the restore: {restore}")


def _checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"fanotify: {os.strerror(ctypes.get_errno())}")
    return answer

"""Pages that are made before anybody writes to them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kybernate_shim.linux.populate import populate
from kybernate_shim.sizes import HUGE_PAGE

SIZE = 5 * HUGE_PAGE + 3 * mmap.PAGESIZE


@contextmanager
def mapped(fd: int) -> Iterator[int]:
    """Map the first SIZE bytes of a file, and yield the address."""
    pages = mmap.mmap(fd, SIZE)
    anchor = ctypes.c_char.from_buffer(pages)
    try:
        yield ctypes.addressof(anchor)
    finally:
        del anchor
        pages.close()


@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_all_pages_are_there(threads: int) -> None:
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, SIZE)
        with mapped(fd) as address:
            populate(address, SIZE, threads, os.sched_getaffinity(0))
            assert os.fstat(fd).st_blocks * 512 == SIZE
    finally:
        os.close(fd)


def test_callers_thread_stays_on_its_processors() -> None:
    before = os.sched_getaffinity(0)
    pages = mmap.mmap(-1, SIZE)
    anchor = ctypes.c_char.from_buffer(pages)
    populate(ctypes.addressof(anchor), SIZE, 2, {min(before)})
    assert os.sched_getaffinity(0) == before


def test_file_that_ends_before_is_an_error() -> None:
    with tempfile.TemporaryFile(dir=Path("/dev/shm")) as file:
        file.truncate(SIZE)
        with mapped(file.fileno()) as address:
            file.truncate(HUGE_PAGE)
            with pytest.raises(OSError, match="No space left") as caught:
                populate(address, SIZE, 2)
    assert caught.value.errno == errno.ENOSPC

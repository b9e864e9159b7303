"""Populates pages of our own memory with several threads concurrently: one thread alone would delay a large copy."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kybernate_shim.sizes import HUGE_PAGE

Result = TypeVar("Result")

POPULATE_WRITE = 23  # of madvise(2), since Linux 5.14


def populate(start: int, size: int, threads: int, cpus: Collection[int] = ()) -> None:
    """Make the pages of `size` bytes at the address `start`, as if all of them had been written to.

    The threads run on `cpus` where any are named: pages are near them, unless a policy says otherwise.
    Raises OSError, with what could be made in place: ENOSPC where the filesystem of a mapped file is full, EINVAL
    where the kernel cannot do this.
    """

    def make(offset: int, length: int) -> int:
        failed = _libc().madvise(start + offset, length, POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    if numbers := [number for number in in_shares(size, threads, cpus, make) if number]:
        number = errno.ENOSPC if numbers[0] == errno.EFAULT else numbers[0]
        raise OSError(number, os.strerror(number))


def in_shares(size: int, threads: int, cpus: Collection[int], work: Callable[[int, int], Result]) -> list[Result]:
    """Call `work` with offset and length of each thread's share of `size` bytes, which begins with a huge page.

    Returns the results in the order of offsets. The threads run on `cpus` where any are named.
    """
    share = -(-size // threads // HUGE_PAGE) * HUGE_PAGE

    def move() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of the thread

    with ThreadPoolExecutor(threads, initializer=move) as pool:
        return list(pool.map(lambda offset: work(offset, min(share, size - offset)), range(0, size, share)))


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: it leaves the interpreter lock
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library

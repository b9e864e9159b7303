"""Keeps the pages of forked processes shared with the server: each page that a process writes is copied for it.

An interpreter writes to every object that it even looks at, because it counts references there. Objects that are made
immortal are not counted (PEP 683, which was made for servers that fork); the garbage collector ignores those that are
frozen. What is loaded before the first fork lives as long as the server anyway.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from types import CodeType, FunctionType

# What makes an object immortal, by version of CPython: a count in the lower half of the eight bytes at its beginning,
# and from 3.14 on a flag in their last two, which the evaluation loop looks at. Such a count is never counted up again;
# that of 3.14 is in the middle of a range, for extensions for older versions do count. Source: Include/refcount.h.
MARKS = {(3, 12): 0xFFFFFFFF, (3, 13): 0xFFFFFFFF, (3, 14): 0xE0000000 | 1 << 48}
FLAGS = 0xFFFF << 48
DRIFT = 1 << 28  # of a count, by those extensions

# What an interpreter's allocator for small objects takes its blocks from. Source: Objects/obmalloc.c.
POOL_BYTES, POOL_HEADER = 1 << 14, 48
BLOCK_SIZES = range(16, 513, 16)
GAP_SIZES = (*range(8192, 1032, -64), *range(1032, 23, -16))  # those up to 1032 may be kept for their very size
MOST_BYTES = 1 << 18  # of one size, in case memory is not laid out as expected
MOST_GAPS = 10_000

_filling: list[object] = [None] * 64  # long enough to take none of those blocks, even when it grows


def fix_constants() -> None:
    """Make the constants of functions immortal; no function may have loaded one yet.

    Python 3.14 looks at a constant when an instruction loads it for the first time. If it is mortal then, that
    instruction counts its references ever after.
    """
    gc.unfreeze()  # or what the first server has frozen would be overlooked
    if counts_can_be_fixed():
        for function in gc.get_objects():
            if type(function) is FunctionType:
                _make_immortal(list(function.__code__.co_consts))
    gc.freeze()


def keep_shared() -> None:
    """Let processes that are forked from now on copy as little as possible. Takes a quarter of a second."""
    gc.unfreeze()
    gc.collect()
    if counts_can_be_fixed():
        _make_immortal(gc.get_objects())
    for size in BLOCK_SIZES:
        _fill_pools(size)
    _fill_heap()
    gc.freeze()


def counts_can_be_fixed() -> bool:
    """Return whether this is an interpreter whose counts we know; None, immortal by itself, must look as expected."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] in MARKS
        and sys.byteorder == "little"
        and sys.maxsize > 1 << 32
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and bool(_count(None).value & 1 << 31)
        and _count(None).value & _mark() & FLAGS == _mark() & FLAGS
    )


def _mark() -> int:
    return MARKS[sys.version_info[:2]]


def _make_immortal(objects: list[object]) -> None:
    """Mark `objects` and all that they refer to. The mark shows what has been visited: no table is needed."""
    mark = _mark()
    while objects:
        thing = objects.pop()
        count = _count(thing)
        if abs((count.value & ~FLAGS) - (mark & ~FLAGS)) < DRIFT and count.value & mark & FLAGS == mark & FLAGS:
            continue
        count.value = count.value & FLAGS | mark
        objects += gc.get_referents(thing)
        if type(thing) is CodeType:  # the collector does not track it; isinstance would ask what a weak proxy refers to
            objects += (thing.co_name, thing.co_qualname, thing.co_names, *thing.co_consts)


def _fill_pools(size: int) -> None:
    """Take the free blocks of `size` bytes that lie between shared objects, so that new objects come to new pages."""
    before = 0
    for _ in range(MOST_BYTES // size):
        block = _block(size)
        _filling.append(block)
        place = id(block)
        if place - before == size and before % POOL_BYTES == POOL_HEADER:
            break  # the first two of an empty pool
        before = place


def _block(size: int) -> object:
    """Return a new object of that size that the collector does not track, and so begins where its memory does."""
    if size == object.__basicsize__:
        return object()
    return complex(1, 1) if size == complex.__basicsize__ else bytes(size - bytes.__basicsize__)


class _Mallinfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [*((f"_{number}", ctypes.c_size_t) for number in range(9)), ("keepcost", ctypes.c_size_t)]


def _fill_heap() -> None:
    """Do the same for larger ones: take every gap in the heap of the C library below its free end."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # another C library, or one before 2.33
    libc.mallinfo2.restype = _Mallinfo
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_size_t
    libc.free.argtypes = [ctypes.c_size_t]
    libc.malloc_trim(0)
    end = libc.sbrk(0) - libc.mallinfo2().keepcost
    for size in GAP_SIZES:
        for _ in range(MOST_GAPS):
            if (place := libc.malloc(size)) >= end:
                libc.free(place)
                break


def _count(thing: object) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(id(thing))

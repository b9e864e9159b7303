#!/usr/bin/env python3
"""Compute like computes.py, with its arguments, and have the lock of the heap most of the time, for long.

To count what is free in the heap takes so long. MALLOC_ARENA_MAX=1 makes it the only heap, HELD says for how much of
the time (0.5). A test workload.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

import computes

HELD = float(os.environ.get("HELD", "0.5"))
CHUNKS = 500_000
SIZE = 144  # more than what a thread keeps apart, and too small to be given back to the kernel


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")


def count(libc: ctypes.CDLL) -> None:
    while True:
        began = time.monotonic()
        libc.mallinfo2()
        time.sleep((time.monotonic() - began) * (1 / HELD - 1))


if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.mallinfo2.restype = _Counts
    chunks = [libc.malloc(SIZE) for _ in range(CHUNKS)]
    for chunk in chunks[::2]:
        libc.free(chunk)
    threading.Thread(target=count, args=(libc,), daemon=True).start()
    computes.main()

#!/usr/bin/env python3
"""Compute like computes.py, with its arguments, and have the lock of the heap for a half of the time.

To trim the heap takes so long. MALLOC_ARENA_MAX=1 makes it the only heap. A test workload.
"""

from __future__ import annotations

import ctypes
import threading
import time

import computes


def trim(libc: ctypes.CDLL) -> None:
    while True:
        began = time.monotonic()
        libc.malloc_trim(0)
        time.sleep(time.monotonic() - began)


if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pieces = [libc.malloc(9000) for _ in range(20000)]  # an idle page in each
    for piece in pieces[::2]:
        libc.free(ctypes.c_void_p(piece))
    threading.Thread(target=trim, args=(libc,), daemon=True).start()
    computes.main()

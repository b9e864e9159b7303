"""A program whose environment cannot be read: it gives the kernel an address for it where nothing is mapped."""

from __future__ import annotations

HIDING = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
fields = ["", "", "", *open("/proc/self/stat").read().rpartition(")")[2].split()]
hidden = mmap.mmap(-1, 1 << 16)
begin = ctypes.addressof(ctypes.c_char.from_buffer(hidden))
libc.sbrk.restype = ctypes.c_void_p
where = [*map(int, (*fields[26:28], *fields[45:48])), libc.sbrk(0), int(fields[28]), *map(int, fields[48:50])]
layout = (ctypes.c_uint64 * 13)(*where, begin, begin + (1 << 16), 0, (1 << 64) - (1 << 32))
if libc.prctl(35, 14, ctypes.byref(layout), ctypes.sizeof(layout), 0):
    raise OSError(ctypes.get_errno(), "prctl")
libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(1 << 16))
assert not open("/proc/self/environ", "rb").read()
print(flush=True)
time.sleep(60)
"""

"""Releases the pages of files that this process has mapped: most have code that only its start needed.

A page that is needed again is found in the page cache, with its neighbours.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4

_unchanged: set[str] = set()


def let_go() -> None:
    """Unmap them. The first call finds them, which spares processes that are forked later the long search."""
    if not _unchanged:
        _unchanged.update(unchanged(Path("/proc/self/smaps").read_text()))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        if mapping in _unchanged:  # or something else might be there by now
            start, end = (int(address, 16) for address in mapping.partition(" ")[0].split("-"))
            madvise(start, end - start, MADV_DONTNEED)


def unchanged(smaps: str) -> Iterator[str]:
    """Yield the lines of /proc/PID/maps for mappings that equal their file; relocated ones, for example, do not."""
    for entry in filter(None, re.split(r"^(?=[0-9a-f]+-)", smaps, flags=re.MULTILINE)):
        mapping, _, values = entry.partition("\n")
        _, perms, _, _, inode, *_ = mapping.split()
        if inode != "0" and perms in ("r--p", "r-xp") and re.search(r"^Anonymous: +0 kB$", values, re.MULTILINE):
            yield mapping

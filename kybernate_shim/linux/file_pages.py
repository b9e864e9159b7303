"""Lets go of the pages of files that this process has mapped: most have code that only its start needed.

Who needs one again finds it in the page cache, with its neighbours.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4

_regions: list[tuple[int, int]] = []


def let_go() -> None:
    """Unmap them. The first call looks where they are, and forked processes have them there, too."""
    if not _regions:
        _regions.extend(unchanged(Path("/proc/self/smaps").read_text()))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for start, size in _regions:
        madvise(start, size, MADV_DONTNEED)


def unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield start and size of the mappings that are as their file is; what was relocated, for example, is not."""
    for entry in filter(None, re.split(r"^(?=[0-9a-f]+-)", smaps, flags=re.MULTILINE)):
        first, _, values = entry.partition("\n")
        span, perms, _, _, inode, *_ = first.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if inode != "0" and perms in ("r--p", "r-xp") and re.search(r"^Anonymous: +0 kB$", values, re.MULTILINE):
            yield start, end - start

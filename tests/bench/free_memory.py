"""Keeps a virtual machine from giving free memory back to its host while something is measured.

Who is the next to use such memory waits until the host has found some again, and who that is, is chance: CRIU restored
the same 2 GiB in 1.1 to 2.9 s, whatever the shim, and in 1.1 to 1.2 s where the memory had stayed.
Source: the kernel's mm/page_reporting.c, and its parameter `min_free_ms` where the kernel has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARAMETER = Path("/sys/module/page_reporting/parameters/min_free_ms")
LONG = 120_000  # ms, within which what is measured next has taken the memory again


@contextmanager
def free_memory_kept() -> Iterator[None]:
    """Let free memory wait for long before it is given back, where that can be chosen."""
    try:
        before = PARAMETER.read_text()
        PARAMETER.write_text(str(LONG))
    except OSError:
        yield  # another kernel, or not ours to choose
        return
    try:
        yield
    finally:
        PARAMETER.write_text(before)

"""Sizes in bytes that the kernel and the driver give to memory, each in one place, and sizes by NUMA node."""

from __future__ import annotations

from typing import Final

HUGE_PAGE: Final = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB
GRAIN: Final = 2 << 20  # the least VRAM that the driver maps or moves; all that the library in a program maps has it
NO_NODE: Final = -1  # in the place of a NUMA node: none in particular, as the kernel has it
NodeSizes = tuple[tuple[int, int], ...]  # NUMA nodes, and bytes on each


def mib(count: int) -> str:
    """Return a number of bytes in MiB, for a message."""
    return f"{count / (1 << 20):.0f} MiB"

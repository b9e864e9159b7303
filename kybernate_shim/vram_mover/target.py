"""The memory of the process whose VRAM bytes are moved: copies whose errors say what has happened to it."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from kybernate_shim.linux import process_memory
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.vram_io.errors import DataPathRefused, RegionChanged, TargetGone, VramError


def read_into(pid: int, address: int, buffer: int, size: int) -> None:
    """Copy from the process to our own address `buffer`. Raises TargetGone, DataPathRefused, RegionChanged."""
    _copy(process_memory.read_into, pid, address, buffer, size)


def write_from(pid: int, address: int, buffer: int, size: int) -> None:
    """Copy from our own address `buffer` to the process. Raises as read_into."""
    _copy(process_memory.write_from, pid, address, buffer, size)


def require_mapped(pid: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Raise RegionChanged unless each range (start, end) is private anonymous memory of the process, wholly.

    Raises TargetGone where the process has ended, DataPathRefused where its memory map cannot be read.
    """
    try:
        regions = process_memory.read_maps(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetGone(f"process {pid} has ended") from error
    except PermissionError as error:
        raise DataPathRefused(f"the memory map of process {pid} cannot be read: {error.strerror}") from error
    if not regions:  # a zombie has a map without lines
        raise TargetGone(f"process {pid} has ended")
    own = [region for region in regions if region.private_anonymous]
    for start, end in ranges:
        reached = start
        for region in own:
            if region.start <= reached < region.end:
                reached = region.end
        if reached < end:
            raise RegionChanged(
                f"process {pid} has no private memory at {reached:#x} any more (of {start:#x}-{end:#x})"
            )


def _copy(call: Callable[[int, int, int, int], None], pid: int, address: int, buffer: int, size: int) -> None:
    try:
        call(pid, address, buffer, size)
    except process_memory.ShortCopy as error:
        raise _reason(pid, address, size) from error
    except OSError as error:
        if error.errno == errno.EPERM:
            raise DataPathRefused(f"the memory of process {pid} cannot be accessed: {error.strerror}") from error
        if error.errno == errno.ESRCH:
            raise TargetGone(f"process {pid} has ended") from error
        if error.errno == errno.EFAULT:
            raise _reason(pid, address, size) from error
        raise


def require_alive(pid: int) -> None:
    """Raise TargetGone for a process that has ended, or is about to."""
    if _has_ended(pid):
        raise TargetGone(f"process {pid} has ended")


def _reason(pid: int, address: int, size: int) -> VramError:
    if _has_ended(pid):
        return TargetGone(f"process {pid} has ended")
    return RegionChanged(f"process {pid}: the {size} bytes at {address:#x} are not all there any more")


def _has_ended(pid: int) -> bool:
    """Return whether the process has ended: its memory, and so its map, is gone first, or a SIGKILL is pending."""
    try:
        if not Path(f"/proc/{pid}/maps").read_bytes():
            return True
        status = text_of(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return True
    waiting = (int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s+(\w+)$", status, re.MULTILINE))
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in waiting)

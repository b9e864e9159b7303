"""The driver's own memory for its copy of the VRAM, made by several threads of ours, and of huge pages.

The driver asks for one large mapping with all of its pages (measured on driver 580), and the kernel makes them in the
one thread that asks. Here that call is intercepted: it gets its mapping without pages, huge pages are then advised for
it, and many threads of ours touch it in parallel from outside, before the driver resumes. These run on the CPUs that
are near the driver's thread, so that its memory is on the same node as otherwise. No other program is affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from kybernate_shim.linux import process_memory
from kybernate_shim.linux.numa import processors_near
from kybernate_shim.linux.populate import in_shares
from kybernate_shim.linux.ptrace.mmap_interception import FLAGS, MAP_POPULATE, Asked, Call, MmapInterception
from kybernate_shim.linux.ptrace.seized import MADV_HUGEPAGE, own_abi
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.sizes import HUGE_PAGE
from kybernate_shim.vram_mover.regions import SMALLEST_BYTES


class Prefaulting:
    """The plan for one process."""

    def __init__(self, pid: int, threads: int) -> None:
        self._pid = pid
        self._threads = threads
        self._size = 0
        self._near: set[int] = set()

    def change(self, asked: Asked) -> Mapping[int, int] | None:
        if not asked.private_anonymous or not asked.populated or asked.size < SMALLEST_BYTES:
            return None
        self._size, self._near = asked.size, processors_near(asked.tid)
        return {FLAGS: asked.flags & ~MAP_POPULATE}

    def made(self, start: int, call: Call) -> None:
        """Make the pages; the driver makes the rest when it needs them, as where there are no huge ones."""
        with suppress(InjectionFailed):
            call(own_abi().madvise, start, self._size, MADV_HUGEPAGE)

        def touch(offset: int, length: int) -> None:
            with suppress(OSError, process_memory.ShortCopy):
                process_memory.touch(self._pid, start + offset, start + offset + length, HUGE_PAGE)

        in_shares(self._size, self._threads, self._near, touch)


def prefaulting(pid: int, tids: Sequence[int], threads: int, *, seconds: float) -> MmapInterception | None:
    """Begin to wait for the driver's call in threads `tids` of a process; None where that is not possible."""
    try:
        catch = MmapInterception(tids, Prefaulting(pid, threads), seconds=seconds)
        catch.start()
    except InjectionFailed:
        return None
    return catch

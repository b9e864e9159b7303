"""Memory that bytes pass through: mapped, page-aligned, reused for every piece, unknown to the garbage collector."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

BLOCK_BYTES = 256 << 10  # the unit of holes: small enough to find them, large enough not to shred a file


class Buffer:
    """`size` bytes of own memory: `view` for Python's calls, `address` for the kernel's."""

    def __init__(self, size: int) -> None:
        # Not shared, or a huge page would need the shmem setting of the node.
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)

    def data_runs(self, size: int) -> list[tuple[int, int]]:
        """Return what is not zero in the first `size` bytes: (offset, length) in whole blocks, neighbours joined."""
        return data_runs(self.address, size)

    def close(self) -> None:
        """Release the memory; it is unmapped with its last view, which an error that is being raised may still hold."""
        del self._anchor, self.view, self._map


def data_runs(address: int, size: int) -> list[tuple[int, int]]:
    """Return what is not zero of `size` bytes of our own memory: as Buffer.data_runs does."""
    # Held by a name: of threads that come first at the same time, all but one have a block that nothing else refers to.
    compare, zeros = _memcmp(), _zeros()
    runs: list[tuple[int, int]] = []
    for offset in range(0, size, BLOCK_BYTES):
        length = min(BLOCK_BYTES, size - offset)
        if compare(address + offset, zeros.address, length):
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((offset, length))
    return runs


class _Zeros:
    """One block that is never written: all of it is the kernel's one page of zeros, which stays in the cache."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)


@cache
def _zeros() -> _Zeros:
    return _Zeros()


@cache
def _memcmp() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).memcmp  # CDLL, not PyDLL: it leaves the interpreter lock
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    call.restype = ctypes.c_int
    return call

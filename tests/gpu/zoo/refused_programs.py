"""Programs that the driver takes out of VRAM and does not bring back: pre-flight must refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.gpu.zoo.figures import Options, Round
from tests.gpu.zoo.gpu import MIB, SHAREABLE, Gpu


def managed(options: Options) -> Round:
    """Keep memory that moves between host and GPU by itself."""
    gpu, size = Gpu(), options.mib * MIB
    address = c_uint64()
    gpu("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))  # CU_MEM_ATTACH_GLOBAL

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            gpu.fill(address.value, number, size)
            yield f"filled {number}", gpu.checksum(address.value, MIB)

    return a_round


def imported(options: Options) -> Round:
    """Map memory a second time, as another process would that its handle was passed to."""
    gpu, size = Gpu(), min(options.mib, 64) * MIB
    handle, descriptor, second = gpu.make(size, SHAREABLE), c_int(), c_uint64()
    gpu("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), c_int(SHAREABLE), c_uint64())
    gpu("cuMemImportFromShareableHandle", byref(second), c_void_p(descriptor.value), c_int(SHAREABLE))
    mine, theirs = gpu.reserve(size), gpu.reserve(size)
    gpu.map(mine, size, handle)
    gpu.map(theirs, size, second.value)

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            gpu.fill(mine, number, size)
            yield f"seen {number}", gpu.checksum(theirs, MIB)

    return a_round

"""Programs that the driver takes out of VRAM and does not bring back: pre-flight must refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.gpu.zoo.card import MIB, SHAREABLE, Card
from tests.gpu.zoo.figures import Options, Round


def managed(options: Options) -> Round:
    """Keep memory that moves between host and GPU by itself."""
    card, size = Card(), options.mib * MIB
    address = c_uint64()
    card("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))  # CU_MEM_ATTACH_GLOBAL

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            card.fill(address.value, number, size)
            yield f"filled {number}", card.checksum(address.value, MIB)

    return a_round


def imported(options: Options) -> Round:
    """Map memory a second time, as another process would that its handle was passed to."""
    card, size = Card(), min(options.mib, 64) * MIB
    handle, descriptor, second = card.make(size, SHAREABLE), c_int(), c_uint64()
    card("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), c_int(SHAREABLE), c_uint64())
    card("cuMemImportFromShareableHandle", byref(second), c_void_p(descriptor.value), c_int(SHAREABLE))
    mine, theirs = card.reserve(size), card.reserve(size)
    card.map(mine, size, handle)
    card.map(theirs, size, second.value)

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            card.fill(mine, number, size)
            yield f"seen {number}", card.checksum(theirs, MIB)

    return a_round

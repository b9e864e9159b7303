"""Moves blocks between a program's VRAM and the arena, through `cuda.bindings.driver`. For the arena's worker alone.

The program hands its memory out as a descriptor; here it is mapped a second time, copied by the card itself from or to
pinned memory, and let go of. Nothing is believed of what the program says about it but the size, which the driver
checks when it maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from kybernate_shim.cuda.arena.memory import Extent, Memory

PIECE = 64 << 20  # of one copy: so that the streams share a large block
STREAMS = 4
PINNED = 1 << 30  # registered at once: a failure in the middle of a large arena leaves the rest usable
MADV_POPULATE_WRITE = 23
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context


class DriverRefused(Exception):
    """The driver has refused a call."""


@dataclass
class Device:
    """A card that memory was copied to or from, and what we hold of it."""

    context: Any
    streams: list[Any]


class Transfer:
    """Our end of the copies: the arena, mapped and pinned as far as it has been used, and contexts on the cards."""

    def __init__(self, memory: Memory) -> None:
        fd = os.open(memory.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, memory.size)
        finally:
            os.close(fd)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pinned: set[int] = set()
        self._devices: dict[int, Device] = {}

    def out(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]]) -> None:
        """Copy memory behind `descriptors` to `places` in the arena. Raises DriverRefused."""
        self._copy(
            descriptors, places, lambda host, card, size, stream: cuda.cuMemcpyDtoHAsync(host, card, size, stream)
        )

    def back(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]]) -> None:
        """Copy `places` of the arena to the memory behind `descriptors`. Raises DriverRefused."""
        self._copy(
            descriptors, places, lambda host, card, size, stream: cuda.cuMemcpyHtoDAsync(card, host, size, stream)
        )

    def enter_device_of(self, descriptor: int) -> None:
        """Be ready to copy from the card that memory is on; closes `descriptor`. Raises DriverRefused."""
        try:
            with _imported([descriptor]) as (handle,):
                self._enter(int(_checked(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id))
        finally:
            os.close(descriptor)

    def pin(self, extents: Iterable[Extent]) -> None:
        """Fault in and pin the parts of the arena that hold `extents`. Raises DriverRefused."""
        self._any_context()
        for extent in extents:
            for part in range(extent.start // PINNED, (extent.start + extent.size - 1) // PINNED + 1):
                if part in self._pinned:
                    continue
                start = part * PINNED
                size = min(PINNED, len(self._map) - start)
                _fault_in(self._start + start, size)
                _checked(cuda.cuMemHostRegister(self._start + start, size, PORTABLE))
                self._pinned.add(part)

    def _copy(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]], call: Any) -> None:
        self.pin(extent for extents in places for extent in extents)
        with _imported(descriptors) as handles:
            sizes = [sum(extent.size for extent in extents) for extents in places]
            with self._mapped(handles, sizes) as mapped:
                used: list[Any] = []
                for (device, address), extents in zip(mapped, places, strict=True):
                    self._enter(device)
                    for number, (card, host, size) in enumerate(_pieces(address, extents)):
                        stream = self._devices[device].streams[number % STREAMS]
                        _checked(call(self._start + host, card, size, stream))
                    used.append(device)
                for device in dict.fromkeys(used):
                    self._enter(device)
                    for stream in self._devices[device].streams:
                        _checked(cuda.cuStreamSynchronize(stream))

    @contextmanager
    def _mapped(self, handles: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """Map memory for the card that it is on; yields (card, address) of each."""
        done: list[tuple[int, int]] = []
        try:
            for handle, size in zip(handles, sizes, strict=True):
                device = int(_checked(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id)
                self._enter(device)
                address = int(_checked(cuda.cuMemAddressReserve(size, 0, 0, 0)))
                try:
                    _checked(cuda.cuMemMap(address, size, 0, handle, 0))
                except DriverRefused:
                    cuda.cuMemAddressFree(address, size)
                    raise
                done.append((device, address))
                _checked(cuda.cuMemSetAccess(address, size, [_read_write(device)], 1))
            yield done
        finally:
            for (device, address), size in zip(done, sizes, strict=False):
                for stream in self._devices[device].streams:
                    cuda.cuStreamSynchronize(stream)  # of a copy that was begun before a failure
                cuda.cuMemUnmap(address, size)
                cuda.cuMemAddressFree(address, size)

    def _enter(self, device: int) -> None:
        """Make a card's context the current one, and make it first where there is none."""
        if device not in self._devices:
            context = _checked(cuda.cuDevicePrimaryCtxRetain(device))
            _checked(cuda.cuCtxSetCurrent(context))
            non_blocking = 1
            streams = [_checked(cuda.cuStreamCreate(non_blocking)) for _ in range(STREAMS)]
            self._devices[device] = Device(context, streams)
        _checked(cuda.cuCtxSetCurrent(self._devices[device].context))

    def _any_context(self) -> None:
        if not self._devices:
            self._enter(0)


@contextmanager
def _imported(descriptors: Sequence[int]) -> Iterator[list[Any]]:
    handles: list[Any] = []
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    try:
        for descriptor in descriptors:
            handles.append(_checked(cuda.cuMemImportFromShareableHandle(descriptor, kind)))
        yield handles
    finally:
        for handle in handles:
            cuda.cuMemRelease(handle)


def _pieces(address: int, extents: Sequence[Extent]) -> Iterator[tuple[int, int, int]]:
    """Yield (address on the card, offset in the arena, bytes) of copies that make up a block.

    A copy must not leave the range of host memory that was pinned at once, so none crosses a multiple of PIECE.
    """
    for extent in extents:
        at, end = extent.start, extent.start + extent.size
        while at < end:
            size = min(PIECE - at % PIECE, end - at)
            yield address, at, size
            at, address = at + size, address + size


def _from_card(host: int, card: int, size: int, stream: Any) -> Any:
    return cuda.cuMemcpyDtoHAsync(host, card, size, stream)


def _to_card(host: int, card: int, size: int, stream: Any) -> Any:
    return cuda.cuMemcpyHtoDAsync(card, host, size, stream)


def _fault_in(start: int, size: int) -> None:
    """Have pages under an address range, with several threads; what cannot be had is left to whoever needs it."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for at in range(0, size, PIECE):
            threads.submit(libc.madvise, start + at, min(PIECE, size - at), MADV_POPULATE_WRITE)


def _read_write(device: int) -> Any:
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _checked(answer: Any) -> Any:
    """Return what a call of the driver gave beside its result. Raises DriverRefused."""
    result, *values = answer
    if result:
        raise DriverRefused(f"the driver refuses a step of the arena: {result.name}")
    return values[0] if values else None

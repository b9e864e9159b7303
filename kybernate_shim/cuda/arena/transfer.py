"""Moves blocks between a program's VRAM and the arena, through `cuda.bindings.driver`. For the arena's worker alone.

The program hands its memory out as a descriptor; here it is mapped a second time, copied by the card itself from or to
pinned memory, and let go of. Nothing is believed of what the program says about it but the size, which the driver
checks when it maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from cuda.bindings import driver as cuda

from kybernate_shim.cuda.arena.memory import Extent, Memory

PIECE = 64 << 20  # of one copy: so that the streams share a large block
STREAMS = 4  # of each move: one process may leave while another comes
PINNED = 1 << 30  # registered at once: a failure in the middle of a large arena leaves the rest usable
MADV_POPULATE_WRITE = 23
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for anybody's default stream
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context


class DriverRefused(Exception):
    """The driver has refused a call."""


Call = Callable[[int, int, int, Any], Any]  # of a copy: host address, card's address, bytes, stream


class Transfer:
    """Our end of the copies: the arena, mapped and pinned as far as it has been used, and contexts on the cards.

    Several threads may use it at once, each for a process of its own.
    """

    def __init__(self, memory: Memory) -> None:
        fd = os.open(memory.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, memory.size)
        finally:
            os.close(fd)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lock = threading.RLock()
        self._pinned: set[int] = set()
        self._contexts: dict[int, Any] = {}

    def out(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]]) -> None:
        """Copy memory behind `descriptors` to `places` in the arena. Raises DriverRefused."""
        self._copy(descriptors, places, _from_card)

    def back(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]]) -> None:
        """Copy `places` of the arena to the memory behind `descriptors`. Raises DriverRefused."""
        self._copy(descriptors, places, _to_card)

    def enter_device_of(self, descriptor: int) -> None:
        """Be ready to copy from the card that memory is on; closes `descriptor`. Raises DriverRefused."""
        try:
            with _imported([descriptor]) as (handle,):
                self._enter(_card_of(handle))
        finally:
            os.close(descriptor)

    def pin(self, extents: Iterable[Extent]) -> None:
        """Fault in and pin the parts of the arena that hold `extents`. Raises DriverRefused."""
        with self._lock:
            self._enter(next(iter(self._contexts), 0))
            for extent in extents:
                for part in range(extent.start // PINNED, (extent.start + extent.size - 1) // PINNED + 1):
                    self._pin(part)

    def _pin(self, part: int) -> None:
        if part in self._pinned:
            return
        start = part * PINNED
        size = min(PINNED, len(self._map) - start)
        _fault_in(self._start + start, size)
        _checked(cuda.cuMemHostRegister(self._start + start, size, PORTABLE))
        self._pinned.add(part)

    def _copy(self, descriptors: Sequence[int], places: Sequence[Sequence[Extent]], call: Call) -> None:
        """Copy the blocks of each card after those of another, so that no stream waits for a change of contexts."""
        self.pin(extent for extents in places for extent in extents)
        with _imported(descriptors) as handles:
            by_card: dict[int, list[tuple[Any, Sequence[Extent]]]] = defaultdict(list)
            for handle, extents in zip(handles, places, strict=True):
                by_card[_card_of(handle)].append((handle, extents))
            for card, blocks in by_card.items():
                self._enter(card)
                self._copy_on(card, blocks, call)

    def _copy_on(self, card: int, blocks: Sequence[tuple[Any, Sequence[Extent]]], call: Call) -> None:
        with ExitStack() as stack:
            addresses = [stack.enter_context(_mapped(card, handle, _size(extents))) for handle, extents in blocks]
            streams = [stack.enter_context(_stream()) for _ in range(STREAMS)]
            for address, (_, extents) in zip(addresses, blocks, strict=True):
                for number, (at, host, size) in enumerate(_pieces(address, extents)):
                    _checked(call(self._start + host, at, size, streams[number % STREAMS]))
            for stream in streams:
                _checked(cuda.cuStreamSynchronize(stream))

    def _enter(self, card: int) -> None:
        """Make a card's context this thread's, and make it first where there is none."""
        with self._lock:
            if card not in self._contexts:
                self._contexts[card] = _checked(cuda.cuDevicePrimaryCtxRetain(card))
        _checked(cuda.cuCtxSetCurrent(self._contexts[card]))


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


@contextmanager
def _mapped(card: int, handle: Any, size: int) -> Iterator[int]:
    """Map memory for its card, in whose context we are; yields its address."""
    address = int(_checked(cuda.cuMemAddressReserve(size, 0, 0, 0)))
    try:
        _checked(cuda.cuMemMap(address, size, 0, handle, 0))
        try:
            _checked(cuda.cuMemSetAccess(address, size, [_read_write(card)], 1))
            yield address
        finally:
            cuda.cuMemUnmap(address, size)
    finally:
        cuda.cuMemAddressFree(address, size)


@contextmanager
def _stream() -> Iterator[Any]:
    """Make a stream; what is queued on it when a failure ends the context is done before anything is unmapped."""
    stream = _checked(cuda.cuStreamCreate(NON_BLOCKING))
    try:
        yield stream
    finally:
        cuda.cuStreamSynchronize(stream)
        cuda.cuStreamDestroy(stream)


def _card_of(handle: Any) -> int:
    return int(_checked(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id)


def _size(extents: Sequence[Extent]) -> int:
    return sum(extent.size for extent in extents)


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

"""Moves blocks between a program's VRAM and the arena, through `cuda.bindings.driver`. For the arena's worker alone.

The program exports its memory as a descriptor; here it is mapped a second time, copied by the GPU itself from or to
pinned memory, and unmapped. Of the program's statements about it, only the size is used, which the driver checks at the
mapping. Before the memory is copied out it can be hashed, to see what need not be copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from kybernate_shim.arena.extents import Extent, Part
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.pieces import PieceHashes
from kybernate_shim.cuda_worker import driver
from kybernate_shim.cuda_worker.bindings import driver as cuda
from kybernate_shim.cuda_worker.calls import DriverRefused, checked
from kybernate_shim.cuda_worker.hashing import Hasher
from kybernate_shim.cuda_worker.imported_memory import gpu_of, imported, mapped
from kybernate_shim.cuda_worker.kernel import cached, machine_code
from kybernate_shim.errors import Refused
from kybernate_shim.linux import numa
from kybernate_shim.linux.populate import populate
from kybernate_shim.sizes import NO_NODE

COPY = 64 << 20  # of one call: so that the streams share a large block
SHORT = 4 << 20  # of one call when the driver needs the link, too: it waits for what is queued; divides PINNED
STREAMS = 4  # of each move: one process may leave while another comes
GENTLE_STREAMS = 2  # of a move that leaves room on the link: one copies while the next copy is being queued
SLICE = 1 << 30  # bytes of one move that are queued at a time: some 20 ms of the link, which others wait for
PINNED = 1 << 30  # registered by one call: a failure in the middle of a large arena leaves the rest usable
THREADS = min(8, os.cpu_count() or 1)  # that make pages
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for any default stream
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context
CAPABILITY = (
    cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
)
T = TypeVar("T")

Call = Callable[[int, int, int, Any], Any]  # of a copy: host address, GPU's address, bytes, stream
Check = Callable[[], None]  # raises where the job has to end


def _unlimited() -> None:
    """Let a job continue."""


@dataclass(frozen=True)
class Mapped:
    """A block of a program, as it is mapped here: our number of its GPU, and our address there."""

    gpu: int
    address: int
    size: int


@dataclass
class Prefetched:
    """What the arena has and a GPU as well: (address there, bytes) by the offset in the arena."""

    gpu: int = -1
    size: int = 0
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, offset: int, address: int, size: int) -> None:
        self.places[offset] = address, size
        self.size += size


NOTHING = Prefetched()


class ArenaCopier:
    """Our end of the copies: the arena, mapped and pinned as far as it has been used, and contexts on the GPUs.

    Several threads may use it concurrently, each for a different process.
    """

    def __init__(self, memory: Memory) -> None:
        fd = os.open(memory.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, memory.size)
        finally:
            os.close(fd)
        self._folder = memory.file.parent
        self._banks = memory.banks
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lock = threading.RLock()
        self._hashing = threading.Lock()
        self._pinned: set[int] = set()
        self._contexts: dict[int, Any] = {}
        self._hashers: dict[int, Hasher] = {}
        self._nodes: dict[int, int] = {}
        self._refused: dict[int, list[int]] = {}  # by GPU, memory of ours that the driver would not take back
        self._uncompiled = ""  # why no kernel can be used for hashing

    @contextmanager
    def mapped(self, descriptors: Sequence[int], sizes: Sequence[int]) -> Iterator[list[Mapped]]:
        """Map memory behind `descriptors`, which may be closed meanwhile. Raises DriverRefused."""
        with ExitStack() as stack:
            handles = stack.enter_context(imported(descriptors))
            blocks = []
            for handle, size in zip(handles, sizes, strict=True):
                gpu = gpu_of(handle)
                self._enter(gpu)
                blocks.append(Mapped(gpu, stack.enter_context(mapped(gpu, handle, size)), size))
            yield blocks

    def look(self, blocks: Sequence[Mapped], key: bytes) -> list[PieceHashes]:
        """Hash what is in `blocks`. Raises Refused and DriverRefused."""
        found: dict[Mapped, PieceHashes] = {}
        for gpu, its in _by_gpu(blocks, blocks):
            self._enter(gpu)
            with self._hashing, _stream() as stream:
                seen = self._hasher(gpu).look([(block.address, block.size) for block in its], key, stream)
            found |= zip(its, seen, strict=True)
        return [found[block] for block in blocks]

    def looks_at_once(self, blocks: Sequence[Mapped]) -> bool:
        """Return whether `look` has nothing to compile first. Raises DriverRefused."""
        gpus = {block.gpu for block in blocks} - self._hashers.keys()
        return all(cached(self._folder, *_capability(gpu)).exists() for gpu in gpus)

    def out(
        self,
        blocks: Sequence[Mapped],
        parts: Sequence[Sequence[Part]],
        check: Check = _unlimited,
        *,
        gently: bool = False,
    ) -> None:
        """Copy `parts` of each block to the arena. Raises DriverRefused, and what `check` raises between two slices.

        `gently` as in `back`.
        """
        self._copy(blocks, parts, _from_gpu, gently=gently, check=check)

    def back(
        self,
        blocks: Sequence[Mapped],
        parts: Sequence[Sequence[Part]],
        prefetched: Prefetched = NOTHING,
        *,
        gently: bool = False,
        check: Check = _unlimited,
    ) -> None:
        """Fill `parts` of each block from the arena, or from what is `prefetched`, holes by zeros.

        `gently`: short copies, two of which are queued: the driver, which needs the link, too, waits behind whatever is
        queued. Raises DriverRefused, and what `check` raises between two slices.
        """
        self._copy(blocks, parts, _to_gpu, prefetched, gently=gently, check=check)

    @contextmanager
    def one_by_one(self, gpu: int) -> Iterator[Callable[[int, int, int], None]]:
        """Yield a function that copies bytes from an offset in the arena to an address on a GPU, and waits for that.

        It raises DriverRefused.
        """
        self._enter(gpu)
        with _stream() as stream:

            def copy(offset: int, address: int, size: int) -> None:
                self.pin([Extent(offset, size)])
                self._enter(gpu)
                checked(cuda.cuMemcpyHtoDAsync(address, self._start + offset, size, stream))
                checked(cuda.cuStreamSynchronize(stream))

            yield copy

    @cached_property
    def capacity(self) -> int:
        """The memory of all GPUs, in bytes: no process has more. Raises DriverRefused."""
        return sum(int(checked(cuda.cuDeviceTotalMem(gpu))) for gpu in range(checked(cuda.cuDeviceGetCount())))

    def free(self, gpu: int) -> int:
        """Return how many bytes of a GPU are free. Raises DriverRefused."""
        self._enter(gpu)
        return int(checked(cuda.cuMemGetInfo())[0])

    def allocate(self, gpu: int, size: int) -> int:
        """Return the address of memory of ours on a GPU. Raises DriverRefused."""
        self._enter(gpu)
        return int(checked(cuda.cuMemAlloc(size)))

    def release(self, gpu: int, addresses: Iterable[int]) -> None:
        """Free what `allocate` has returned.

        Raises DriverRefused after all were tried; what the driver has refused is tried again with the next ones.
        """
        with self._lock:
            wanted, self._refused[gpu] = [*self._refused.pop(gpu, []), *addresses], []
        failure = None
        for address in wanted:
            try:
                self._enter(gpu)
                checked(cuda.cuMemFree(address))
            except DriverRefused as error:
                failure = error
                with self._lock:
                    self._refused[gpu].append(address)
        if failure is not None:
            raise failure

    def node_near(self, gpu: int) -> int:
        """Return the NUMA node that a GPU is near, NO_NODE where none is known."""
        if gpu not in self._nodes:
            self._nodes[gpu] = driver.node_near(gpu)
        return self._nodes[gpu]

    def enter_device_of(self, descriptor: int) -> int:
        """Be ready to hash and to copy on the GPU that memory is on, and return which; closes `descriptor`.

        Raises DriverRefused.
        """
        try:
            with imported([descriptor]) as (handle,):
                gpu = gpu_of(handle)
        finally:
            os.close(descriptor)
        self.enter(gpu)
        return gpu

    def enter(self, gpu: int) -> None:
        """Be ready to hash and to copy on a GPU. Raises DriverRefused."""
        self._enter(gpu)
        try:
            with self._hashing:
                self._hasher(gpu)
        except (DriverRefused, Refused):
            pass  # `look` reports it

    def enter_named(self, uuids: Collection[str]) -> None:
        """Be ready to hash and to copy on the GPUs of these names, as far as they are here. Raises DriverRefused."""
        for gpu in gpus_named(uuids):
            self.enter(gpu)

    def pin(self, extents: Iterable[Extent]) -> None:
        """Fault in and pin the parts of the arena that hold `extents`. Raises DriverRefused.

        Others may enter a GPU between two parts: each takes a good part of a second.
        """
        self._enter(next(iter(self._contexts), 0))
        for extent in extents:
            for part in range(extent.start // PINNED, (extent.end - 1) // PINNED + 1):
                with self._lock:
                    self._pin(part)

    def _pin(self, part: int) -> None:
        if part in self._pinned:
            return
        start = part * PINNED
        size = min(PINNED, len(self._map) - start)
        node = next((bank.node for bank in self._banks if start < bank.extent.end), NO_NODE)
        near = numa.processors_of(node) if node != NO_NODE else ()
        with suppress(OSError):  # what cannot be had now shows below
            populate(self._start + start, size, THREADS, near)
        checked(cuda.cuMemHostRegister(self._start + start, size, PORTABLE))
        self._pinned.add(part)

    def _copy(
        self,
        blocks: Sequence[Mapped],
        parts: Sequence[Sequence[Part]],
        call: Call,
        prefetched: Prefetched = NOTHING,
        *,
        gently: bool = False,
        check: Check = _unlimited,
    ) -> None:
        """Copy the blocks of each GPU after those of another, so that no stream waits for a change of contexts.

        No more than a slice is queued at a time: the copies of other jobs wait behind what is queued.
        """
        self.pin(part.extent for its in parts for part in its if not part.extent.is_hole)
        for gpu, pairs in _by_gpu(blocks, list(zip(blocks, parts, strict=True))):
            self._enter(gpu)
            there = prefetched.places if prefetched.gpu == gpu else {}
            with ExitStack() as stack:
                streams = [stack.enter_context(_stream()) for _ in range(GENTLE_STREAMS if gently else STREAMS)]
                most, enough = (SHORT, SHORT) if gently else (COPY, SLICE // STREAMS)  # of a copy, and queued
                copies = (
                    copy for block, its in pairs for part in its for copy in _copies(block.address, part, there, most)
                )
                queued = [0] * len(streams)  # bytes, since the stream was waited for
                for number, (host, at, size) in enumerate(copies):
                    turn = number % len(streams)
                    stream = streams[turn]
                    check()
                    if queued[turn] >= enough:
                        checked(cuda.cuStreamSynchronize(stream))  # while the others continue
                        queued[turn] = 0
                    queued[turn] += size
                    if host is None:
                        checked(cuda.cuMemsetD32Async(at, 0, size // 4, stream))
                    elif host in there:
                        checked(cuda.cuMemcpyDtoDAsync(at, there[host][0], size, stream))
                    else:
                        checked(call(self._start + host, at, size, stream))
                for stream in streams:
                    checked(cuda.cuStreamSynchronize(stream))

    def _hasher(self, gpu: int) -> Hasher:
        """Return what hashes on a GPU, whose context we are in. Raises Refused and DriverRefused."""
        if gpu not in self._hashers:
            self._hashers[gpu] = Hasher(self._machine_code(*_capability(gpu)))
        return self._hashers[gpu]

    def _machine_code(self, major: int, minor: int) -> bytes:
        """A compilation that has failed is not tried again: it takes longer than all the rest."""
        if not self._uncompiled:
            try:
                return machine_code(self._folder, major, minor)
            except Refused as error:
                self._uncompiled = str(error)
        raise Refused(self._uncompiled)

    def _enter(self, gpu: int) -> None:
        """Make a GPU's context this thread's, and make it first where there is none."""
        with self._lock:
            if gpu not in self._contexts:
                self._contexts[gpu] = checked(cuda.cuDevicePrimaryCtxRetain(gpu))
        checked(cuda.cuCtxSetCurrent(self._contexts[gpu]))


def gpus_named(uuids: Collection[str]) -> list[int]:
    """Return our numbers of the GPUs of these names, as far as they are here. Raises DriverRefused."""
    return [gpu for gpu in range(checked(cuda.cuDeviceGetCount())) if driver.uuid_of(gpu) in uuids]


def _by_gpu(blocks: Sequence[Mapped], values: Sequence[T]) -> Iterator[tuple[int, list[T]]]:
    """Sort `values`, one for each block, by the blocks' GPUs."""
    found: dict[int, list[T]] = defaultdict(list)
    for block, value in zip(blocks, values, strict=True):
        found[block.gpu].append(value)
    yield from found.items()


@contextmanager
def _stream() -> Iterator[Any]:
    """Make a stream; what is queued on it when a failure ends the context is done before anything is unmapped."""
    stream = checked(cuda.cuStreamCreate(NON_BLOCKING))
    try:
        yield stream
    finally:
        cuda.cuStreamSynchronize(stream)
        cuda.cuStreamDestroy(stream)


def _capability(gpu: int) -> tuple[int, int]:
    device = checked(cuda.cuDeviceGet(gpu))
    major, minor = (int(checked(cuda.cuDeviceGetAttribute(one, device))) for one in CAPABILITY)
    return major, minor


def _copies(
    address: int, part: Part, there: Mapping[int, tuple[int, int]], most: int
) -> Iterator[tuple[int | None, int, int]]:
    """Yield (offset in the arena, address on the GPU, bytes) of what fills a part of the block at `address`.

    A hole has no offset. What is `there` already is cut as it was; other copies do not cross a multiple of `most`
    bytes: a copy must not leave the range of host memory that one call has pinned.
    """
    address += part.offset
    if part.extent.is_hole:
        yield None, address, part.extent.size
        return
    at, end = part.extent.start, part.extent.end
    while at < end:
        size = min(there[at][1] if at in there else most - at % most, end - at)
        yield at, address + at - part.extent.start, size
        at += size


def _from_gpu(host: int, gpu: int, size: int, stream: Any) -> Any:
    return cuda.cuMemcpyDtoHAsync(host, gpu, size, stream)


def _to_gpu(host: int, gpu: int, size: int, stream: Any) -> Any:
    return cuda.cuMemcpyHtoDAsync(gpu, host, size, stream)

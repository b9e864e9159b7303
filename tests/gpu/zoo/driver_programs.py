"""Programs on the driver's API alone, in ctypes: what they call, the pretended driver has in part, too."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p, cast, pointer

from tests.gpu.zoo.figures import Options, Round, checksum, require
from tests.gpu.zoo.gpu import MIB, Gpu, Host, can_pin

# From 4 bytes on, at and next to the boundaries where a driver or the arena takes another way.
SIZES = (4, 4092, 65540, MIB, 2 * MIB + 12, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
MOST_PINNED = 64  # MiB: an image holds it as well
PIECE = 4 * MIB


def random_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def _filled(host: Host, seed: int) -> Host:
    for offset in range(0, host.size, 16 * MIB):
        size = min(16 * MIB, host.size - offset)
        host.view[offset : offset + size] = random_bytes(seed + offset, size)
    return host


def copies(options: Options) -> Round:
    """Copy there, on the device, and back, through each kind of host memory, by each call, in each size."""
    gpu, size = Gpu(), options.mib * MIB
    pinned = min(size, MOST_PINNED * MIB)
    kinds = {"pageable": size, "registered": pinned, **({"pinned": pinned} if can_pin(gpu) else {})}
    hosts = [_filled(Host(gpu, kind, size), number) for number, (kind, size) in enumerate(kinds.items())]
    streams, one, two = (gpu.stream(), gpu.stream()), gpu.allocate(size), gpu.allocate(size)

    def there_and_back(host: Host, size: int, how: str) -> None:
        length, here = c_size_t(size), c_void_p(host.address)
        if how == "waiting":
            gpu("cuMemcpyHtoD_v2", c_uint64(one), here, length)
            gpu("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, None)
            host.clear(size)
            gpu("cuMemcpyDtoH_v2", here, c_uint64(two), length)
        elif how == "streams":
            first, second = streams
            gpu("cuMemcpyHtoDAsync_v2", c_uint64(one), here, length, first)
            gpu.wait(first)
            host.clear(size)
            gpu("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, second)
            gpu("cuMemcpyDtoHAsync_v2", here, c_uint64(two), length, second)
            gpu.wait(second)
        else:  # the driver sees from the addresses which way it goes
            gpu("cuMemcpyAsync", c_uint64(one), c_uint64(host.address), length, streams[0])
            gpu("cuMemcpyAsync", c_uint64(two), c_uint64(one), length, streams[0])
            gpu.wait(streams[0])
            host.clear(size)
            gpu("cuMemcpy", c_uint64(host.address), c_uint64(two), length)

    ways = ("waiting", "streams", *(("unified",) if gpu.has("cuMemcpyAsync") else ()))

    def a_round() -> Iterator[tuple[str, int]]:
        for host in hosts:
            for size in (size for size in SIZES if size <= host.size):
                for how in ways:
                    there_and_back(host, size, how)
                    yield f"{host.kind} {size} {how}", checksum(host.view[:size])

    return a_round


def memset(options: Options) -> Round:
    """Fill memory by each call, each time with another value, and read it back."""
    gpu, size = Gpu(), options.mib * MIB
    memory, stream = gpu.allocate(size), gpu.stream()

    def a_round() -> Iterator[tuple[str, int]]:
        for number, start in enumerate(range(0, size - PIECE + 1, PIECE)):
            place, value = memory + start, number % 251 + 1
            gpu.fill(place, value, PIECE)
            yield f"8 bits {number}", gpu.checksum(place, PIECE)
            gpu.fill_words(place + 4, value * 0x01020304, PIECE // 8, stream)
            gpu.wait(stream)
            yield f"32 bits {number}", gpu.checksum(place, PIECE)
            if gpu.has("cuMemsetD16_v2"):
                gpu.fill_halves(place + 2, value * 0x0102, PIECE // 4)
                rows = (c_size_t(1024), c_ubyte(255 - value), c_size_t(512), c_size_t(PIECE // 1024))
                gpu("cuMemsetD2D8_v2", c_uint64(place), *rows)
                yield f"16 bits and rows {number}", gpu.checksum(place, PIECE)

    return a_round


MEMORY_TYPE, IS_MANAGED, ORDINAL, RANGE_START, RANGE_SIZE = 2, 8, 9, 11, 12  # CU_POINTER_ATTRIBUTE_…
HOST_MEMORY, DEVICE_MEMORY = 1, 2


def pointers(options: Options) -> Round:
    """Ask what addresses are, of device and host memory, at their beginning and inside; a memset lies between."""
    gpu, size = Gpu(), options.mib * MIB // 4
    blocks = [gpu.allocate(size) for _ in range(4)]
    pinned = Host(gpu, "pinned", MIB)

    def attribute(which: int, address: int) -> int:
        value = c_uint64()
        gpu("cuPointerGetAttribute", byref(value), c_int(which), c_uint64(address))
        return value.value

    def attributes(address: int) -> tuple[int, ...]:
        wanted = (MEMORY_TYPE, IS_MANAGED, ORDINAL)
        values = [c_uint64() for _ in wanted]
        places = (c_void_p * len(wanted))(*(cast(pointer(value), c_void_p) for value in values))
        kinds = (c_int * len(wanted))(*wanted)
        gpu("cuPointerGetAttributes", c_uint(len(wanted)), kinds, places, c_uint64(address))
        return tuple(value.value & 0xFFFFFFFF for value in values)

    def a_round() -> Iterator[tuple[str, int]]:
        for number, block in enumerate(blocks):
            for offset in (0, 4, size // 2, size - 1):
                base, length = c_uint64(), c_size_t()
                gpu("cuMemGetAddressRange_v2", byref(base), byref(length), c_uint64(block + offset))
                require((base.value, length.value) == (block, size), f"the range of {block:#x} + {offset}")
                require(attribute(RANGE_START, block + offset) == block, "the range's start, as an attribute")
                require(attribute(RANGE_SIZE, block + offset) == size, "the range's size, as an attribute")
                require(attribute(MEMORY_TYPE, block + offset) == DEVICE_MEMORY, "the kind of memory")
                yield f"device {number} {offset}", checksum(repr(attributes(block + offset)).encode())
            gpu.fill(block, number, PIECE // 4)
        require(attribute(MEMORY_TYPE, pinned.address) == HOST_MEMORY, "the kind of pinned memory")
        yield "host", checksum(repr(attributes(pinned.address)).encode())

    return a_round


def graphs(options: Options) -> Round:
    """Launch a graph that copies pinned memory in, on the device and out again, and sets some of it in between."""
    gpu, size = Gpu(), options.mib * MIB // 4
    size = min(size, 64 * MIB)
    stream, one, two = gpu.stream(), gpu.allocate(size), gpu.allocate(size)
    source, target = _filled(Host(gpu, "pinned", size), 7), Host(gpu, "pinned", size)
    graph, launchable = c_void_p(), c_void_p()
    length, middle = c_size_t(size), size // 2 // 4 * 4
    gpu("cuStreamBeginCapture_v2", stream, c_int(2))  # relaxed: nothing else is forbidden meanwhile
    gpu("cuMemcpyHtoDAsync_v2", c_uint64(one), c_void_p(source.address), length, stream)
    gpu.fill_words(one + middle, 0x5A5A5A5A, 1024, stream)
    gpu("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, stream)
    gpu("cuMemcpyDtoHAsync_v2", c_void_p(target.address), c_uint64(two), length, stream)
    gpu("cuStreamEndCapture", stream, byref(graph))
    gpu("cuGraphInstantiateWithFlags", byref(launchable), graph, c_uint64())

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            source.view[:4096] = random_bytes(number, 4096)
            target.clear(size)
            gpu("cuGraphLaunch", launchable, stream)
            gpu.wait(stream)
            yield f"launch {number}", checksum(target.view)

    return a_round


def events(options: Options) -> Round:
    """Let one stream wait for the other by events, and ask how long it took, also since the beginning."""
    gpu, size = Gpu(), options.mib * MIB
    streams, memory, other = (gpu.stream(), gpu.stream()), gpu.allocate(size), gpu.allocate(size)
    made = [c_void_p() for _ in range(3)]
    for event in made:
        gpu("cuEventCreate", byref(event), c_uint(0))
    beginning, before, after = made
    gpu("cuEventRecord", beginning, streams[0])
    gpu.synchronize()

    def elapsed(first: c_void_p, last: c_void_p) -> float:
        found = c_float()
        gpu("cuEventElapsedTime", byref(found), first, last)
        return found.value

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(50):
            gpu("cuEventRecord", before, streams[0])
            gpu.fill_words(memory, number * 0x01010101, size // 4, streams[0])
            gpu("cuEventRecord", after, streams[0])
            gpu("cuStreamWaitEvent", streams[1], after, c_uint(0))
            gpu("cuMemcpyDtoDAsync_v2", c_uint64(other), c_uint64(memory), c_size_t(size), streams[1])
            gpu.wait(streams[1])
            gpu("cuEventQuery", after)
            require(elapsed(before, after) >= 0, "the time between two events")
            elapsed(beginning, after)  # that it answers at all: a GPU's clock may begin again
            yield f"after the event {number}", gpu.checksum(other + size - PIECE, PIECE)

    return a_round


def kernels(options: Options) -> Round:
    """Advance words by a kernel, step by step, next to a memory that must stay as it is."""
    gpu, size = Gpu(), options.mib * MIB
    advance, words, kept = gpu.kernel(), gpu.allocate(PIECE), gpu.allocate(size)
    stream, first = gpu.stream(), random_bytes(1, PIECE)
    for start in range(0, size, 16 * MIB):
        gpu.write(kept + start, random_bytes(start, min(16 * MIB, size - start)))

    def a_round() -> Iterator[tuple[str, int]]:
        gpu.write(words, first)
        gpu.synchronize()  # a copy of pageable memory may still be on its way, and the stream does not wait for it
        for number in range(40):
            for _ in range(5):
                gpu.launch(advance, words, PIECE // 4, stream)
            gpu.wait(stream)
            yield f"step {number}", gpu.checksum(words, PIECE)
        for start in range(0, size, 16 * MIB):
            yield f"kept {start}", gpu.checksum(kept + start, min(16 * MIB, size - start))

    return a_round


def virtual(options: Options) -> Round:
    """Map and unmap memory by itself, again and again, and keep some mapped all the while."""
    gpu, size, piece = Gpu(), options.mib * MIB // 2, 32 * MIB
    piece = min(piece, size)
    kept, place = gpu.reserve(size), gpu.reserve(4 * piece)
    handles = [gpu.make(piece) for _ in range(size // piece)]
    for number, handle in enumerate(handles):
        gpu.map(kept + number * piece, piece, handle)
        gpu.write(kept + number * piece, random_bytes(number, piece))

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(12):
            where = place + number % 4 * piece
            handle = gpu.make(piece)
            gpu.map(where, piece, handle)
            gpu.write(where, random_bytes(number, MIB))
            gpu.fill(where + MIB, number, piece - MIB)
            yield f"mapped {number}", gpu.checksum(where, 2 * MIB)
            gpu.unmap(where, piece)
            gpu.release(handle)
        for number in range(len(handles)):
            yield f"kept {number}", gpu.checksum(kept + number * piece, piece)

    return a_round


def pools(options: Options) -> Round:
    """Allocate and free in the order of two streams, from the device's own pool, some kept from round to round."""
    gpu, size = Gpu(), options.mib * MIB
    streams = gpu.stream(), gpu.stream()

    def allocate(size: int, stream: c_void_p) -> int:
        address = c_uint64()
        gpu("cuMemAllocAsync", byref(address), c_size_t(size), stream)
        return address.value

    kept = [allocate(size // 4, streams[0]) for _ in range(2)]
    for number, address in enumerate(kept):
        gpu.fill_words(address, number + 77, size // 16, streams[0])
    gpu.wait(streams[0])

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(30):
            stream, length = streams[number % 2], MIB << number % 6
            address = allocate(length, stream)
            gpu.fill_words(address, number + 1, length // 4, stream)
            gpu.wait(stream)
            yield f"allocated {number}", gpu.checksum(address, MIB)
            gpu("cuMemFreeAsync", c_uint64(address), stream)
        for number, address in enumerate(kept):
            yield f"kept {number}", gpu.checksum(address, size // 4)

    return a_round


def threads(options: Options) -> Round:
    """Four threads allocate, fill, read and free without a pause; the main one looks at what it keeps."""
    gpu, size = Gpu(), options.mib * MIB // 2
    kept = gpu.allocate(size)
    gpu.write(kept, random_bytes(5, min(size, 64 * MIB)))
    turns = [0] * 4

    def churn(number: int) -> None:
        gpu.enter()
        numbers = random.Random(number)
        while True:
            length, value = numbers.choice((MIB, 2 * MIB, 3 * MIB, 16 * MIB)), numbers.randrange(256)
            address = gpu.allocate(length)
            gpu.fill(address, value, length)
            end = bytes(gpu.read(address + length - 4096, 4096))
            require(end == bytes([value]) * 4096, f"what thread {number} has filled")
            gpu.free(address)
            turns[number] += 1

    for number in range(len(turns)):
        threading.Thread(target=churn, args=(number,), daemon=True).start()

    def a_round() -> Iterator[tuple[str, int]]:
        for start in range(0, min(size, 64 * MIB), PIECE):
            yield f"kept {start}", gpu.checksum(kept + start, PIECE)

    return a_round

"""Programs on the driver's API alone, in ctypes: what they call, the pretended driver has in part, too."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p, cast, pointer

from tests.gpu.zoo.card import MIB, Card, Host, can_pin
from tests.gpu.zoo.figures import Options, Round, checksum, require

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
    card, size = Card(), options.mib * MIB
    pinned = min(size, MOST_PINNED * MIB)
    kinds = {"pageable": size, "registered": pinned, **({"pinned": pinned} if can_pin(card) else {})}
    hosts = [_filled(Host(card, kind, size), number) for number, (kind, size) in enumerate(kinds.items())]
    streams, one, two = (card.stream(), card.stream()), card.allocate(size), card.allocate(size)

    def there_and_back(host: Host, size: int, how: str) -> None:
        length, here = c_size_t(size), c_void_p(host.address)
        if how == "waiting":
            card("cuMemcpyHtoD_v2", c_uint64(one), here, length)
            card("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, None)
            host.clear(size)
            card("cuMemcpyDtoH_v2", here, c_uint64(two), length)
        elif how == "streams":
            first, second = streams
            card("cuMemcpyHtoDAsync_v2", c_uint64(one), here, length, first)
            card.wait(first)
            host.clear(size)
            card("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, second)
            card("cuMemcpyDtoHAsync_v2", here, c_uint64(two), length, second)
            card.wait(second)
        else:  # the driver sees from the addresses which way it goes
            card("cuMemcpyAsync", c_uint64(one), c_uint64(host.address), length, streams[0])
            card("cuMemcpyAsync", c_uint64(two), c_uint64(one), length, streams[0])
            card.wait(streams[0])
            host.clear(size)
            card("cuMemcpy", c_uint64(host.address), c_uint64(two), length)

    ways = ("waiting", "streams", *(("unified",) if card.has("cuMemcpyAsync") else ()))

    def a_round() -> Iterator[tuple[str, int]]:
        for host in hosts:
            for size in (size for size in SIZES if size <= host.size):
                for how in ways:
                    there_and_back(host, size, how)
                    yield f"{host.kind} {size} {how}", checksum(host.view[:size])

    return a_round


def memset(options: Options) -> Round:
    """Fill memory by each call, each time with another value, and read it back."""
    card, size = Card(), options.mib * MIB
    memory, stream = card.allocate(size), card.stream()

    def a_round() -> Iterator[tuple[str, int]]:
        for number, start in enumerate(range(0, size - PIECE + 1, PIECE)):
            place, value = memory + start, number % 251 + 1
            card.fill(place, value, PIECE)
            yield f"8 bits {number}", card.checksum(place, PIECE)
            card.fill_words(place + 4, value * 0x01020304, PIECE // 8, stream)
            card.wait(stream)
            yield f"32 bits {number}", card.checksum(place, PIECE)
            if card.has("cuMemsetD16_v2"):
                card.fill_halves(place + 2, value * 0x0102, PIECE // 4)
                rows = (c_size_t(1024), c_ubyte(255 - value), c_size_t(512), c_size_t(PIECE // 1024))
                card("cuMemsetD2D8_v2", c_uint64(place), *rows)
                yield f"16 bits and rows {number}", card.checksum(place, PIECE)

    return a_round


MEMORY_TYPE, IS_MANAGED, ORDINAL, RANGE_START, RANGE_SIZE = 2, 8, 9, 11, 12  # CU_POINTER_ATTRIBUTE_…
HOST_MEMORY, DEVICE_MEMORY = 1, 2


def pointers(options: Options) -> Round:
    """Ask what addresses are, of device and host memory, at their beginning and inside; a memset lies between."""
    card, size = Card(), options.mib * MIB // 4
    blocks = [card.allocate(size) for _ in range(4)]
    pinned = Host(card, "pinned", MIB)

    def attribute(which: int, address: int) -> int:
        value = c_uint64()
        card("cuPointerGetAttribute", byref(value), c_int(which), c_uint64(address))
        return value.value

    def attributes(address: int) -> tuple[int, ...]:
        wanted = (MEMORY_TYPE, IS_MANAGED, ORDINAL)
        values = [c_uint64() for _ in wanted]
        places = (c_void_p * len(wanted))(*(cast(pointer(value), c_void_p) for value in values))
        kinds = (c_int * len(wanted))(*wanted)
        card("cuPointerGetAttributes", c_uint(len(wanted)), kinds, places, c_uint64(address))
        return tuple(value.value & 0xFFFFFFFF for value in values)

    def a_round() -> Iterator[tuple[str, int]]:
        for number, block in enumerate(blocks):
            for offset in (0, 4, size // 2, size - 1):
                base, length = c_uint64(), c_size_t()
                card("cuMemGetAddressRange_v2", byref(base), byref(length), c_uint64(block + offset))
                require((base.value, length.value) == (block, size), f"the range of {block:#x} + {offset}")
                require(attribute(RANGE_START, block + offset) == block, "the range's start, as an attribute")
                require(attribute(RANGE_SIZE, block + offset) == size, "the range's size, as an attribute")
                require(attribute(MEMORY_TYPE, block + offset) == DEVICE_MEMORY, "the kind of memory")
                yield f"device {number} {offset}", checksum(repr(attributes(block + offset)).encode())
            card.fill(block, number, PIECE // 4)
        require(attribute(MEMORY_TYPE, pinned.address) == HOST_MEMORY, "the kind of pinned memory")
        yield "host", checksum(repr(attributes(pinned.address)).encode())

    return a_round


def graphs(options: Options) -> Round:
    """Launch a graph that copies pinned memory in, on the device and out again, and sets some of it in between."""
    card, size = Card(), options.mib * MIB // 4
    size = min(size, 64 * MIB)
    stream, one, two = card.stream(), card.allocate(size), card.allocate(size)
    source, target = _filled(Host(card, "pinned", size), 7), Host(card, "pinned", size)
    graph, launchable = c_void_p(), c_void_p()
    length, middle = c_size_t(size), size // 2 // 4 * 4
    card("cuStreamBeginCapture_v2", stream, c_int(2))  # relaxed: nothing else is forbidden meanwhile
    card("cuMemcpyHtoDAsync_v2", c_uint64(one), c_void_p(source.address), length, stream)
    card.fill_words(one + middle, 0x5A5A5A5A, 1024, stream)
    card("cuMemcpyDtoDAsync_v2", c_uint64(two), c_uint64(one), length, stream)
    card("cuMemcpyDtoHAsync_v2", c_void_p(target.address), c_uint64(two), length, stream)
    card("cuStreamEndCapture", stream, byref(graph))
    card("cuGraphInstantiateWithFlags", byref(launchable), graph, c_uint64())

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            source.view[:4096] = random_bytes(number, 4096)
            target.clear(size)
            card("cuGraphLaunch", launchable, stream)
            card.wait(stream)
            yield f"launch {number}", checksum(target.view)

    return a_round


def events(options: Options) -> Round:
    """Let one stream wait for the other by events, and ask how long it took, also since the beginning."""
    card, size = Card(), options.mib * MIB
    streams, memory, other = (card.stream(), card.stream()), card.allocate(size), card.allocate(size)
    made = [c_void_p() for _ in range(3)]
    for event in made:
        card("cuEventCreate", byref(event), c_uint(0))
    beginning, before, after = made
    card("cuEventRecord", beginning, streams[0])
    card.synchronize()

    def elapsed(first: c_void_p, last: c_void_p) -> float:
        found = c_float()
        card("cuEventElapsedTime", byref(found), first, last)
        return found.value

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(50):
            card("cuEventRecord", before, streams[0])
            card.fill_words(memory, number * 0x01010101, size // 4, streams[0])
            card("cuEventRecord", after, streams[0])
            card("cuStreamWaitEvent", streams[1], after, c_uint(0))
            card("cuMemcpyDtoDAsync_v2", c_uint64(other), c_uint64(memory), c_size_t(size), streams[1])
            card.wait(streams[1])
            card("cuEventQuery", after)
            require(elapsed(before, after) >= 0, "the time between two events")
            elapsed(beginning, after)  # that it answers at all: a card's clock may begin again
            yield f"after the event {number}", card.checksum(other + size - PIECE, PIECE)

    return a_round


def kernels(options: Options) -> Round:
    """Advance words by a kernel, step by step, next to a memory that must stay as it is."""
    card, size = Card(), options.mib * MIB
    advance, words, kept = card.kernel(), card.allocate(PIECE), card.allocate(size)
    stream, first = card.stream(), random_bytes(1, PIECE)
    for start in range(0, size, 16 * MIB):
        card.write(kept + start, random_bytes(start, min(16 * MIB, size - start)))

    def a_round() -> Iterator[tuple[str, int]]:
        card.write(words, first)
        card.synchronize()  # a copy of pageable memory may still be on its way, and the stream does not wait for it
        for number in range(40):
            for _ in range(5):
                card.launch(advance, words, PIECE // 4, stream)
            card.wait(stream)
            yield f"step {number}", card.checksum(words, PIECE)
        for start in range(0, size, 16 * MIB):
            yield f"kept {start}", card.checksum(kept + start, min(16 * MIB, size - start))

    return a_round


def virtual(options: Options) -> Round:
    """Map and unmap memory by itself, again and again, and keep some mapped all the while."""
    card, size, piece = Card(), options.mib * MIB // 2, 32 * MIB
    piece = min(piece, size)
    kept, place = card.reserve(size), card.reserve(4 * piece)
    handles = [card.make(piece) for _ in range(size // piece)]
    for number, handle in enumerate(handles):
        card.map(kept + number * piece, piece, handle)
        card.write(kept + number * piece, random_bytes(number, piece))

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(12):
            where = place + number % 4 * piece
            handle = card.make(piece)
            card.map(where, piece, handle)
            card.write(where, random_bytes(number, MIB))
            card.fill(where + MIB, number, piece - MIB)
            yield f"mapped {number}", card.checksum(where, 2 * MIB)
            card.unmap(where, piece)
            card.release(handle)
        for number in range(len(handles)):
            yield f"kept {number}", card.checksum(kept + number * piece, piece)

    return a_round


def pools(options: Options) -> Round:
    """Allocate and free in the order of two streams, from the device's own pool, some kept from round to round."""
    card, size = Card(), options.mib * MIB
    streams = card.stream(), card.stream()

    def allocate(size: int, stream: c_void_p) -> int:
        address = c_uint64()
        card("cuMemAllocAsync", byref(address), c_size_t(size), stream)
        return address.value

    kept = [allocate(size // 4, streams[0]) for _ in range(2)]
    for number, address in enumerate(kept):
        card.fill_words(address, number + 77, size // 16, streams[0])
    card.wait(streams[0])

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(30):
            stream, length = streams[number % 2], MIB << number % 6
            address = allocate(length, stream)
            card.fill_words(address, number + 1, length // 4, stream)
            card.wait(stream)
            yield f"allocated {number}", card.checksum(address, MIB)
            card("cuMemFreeAsync", c_uint64(address), stream)
        for number, address in enumerate(kept):
            yield f"kept {number}", card.checksum(address, size // 4)

    return a_round


def threads(options: Options) -> Round:
    """Four threads allocate, fill, read and free without a pause; the main one looks at what it keeps."""
    card, size = Card(), options.mib * MIB // 2
    kept = card.allocate(size)
    card.write(kept, random_bytes(5, min(size, 64 * MIB)))
    turns = [0] * 4

    def churn(number: int) -> None:
        card.enter()
        numbers = random.Random(number)
        while True:
            length, value = numbers.choice((MIB, 2 * MIB, 3 * MIB, 16 * MIB)), numbers.randrange(256)
            address = card.allocate(length)
            card.fill(address, value, length)
            end = bytes(card.read(address + length - 4096, 4096))
            require(end == bytes([value]) * 4096, f"what thread {number} has filled")
            card.free(address)
            turns[number] += 1

    for number in range(len(turns)):
        threading.Thread(target=churn, args=(number,), daemon=True).start()

    def a_round() -> Iterator[tuple[str, int]]:
        for start in range(0, min(size, 64 * MIB), PIECE):
            yield f"kept {start}", card.checksum(kept + start, PIECE)

    return a_round

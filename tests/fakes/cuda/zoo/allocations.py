"""Cases that make, free, map or look at memory, and that wait for what is in it."""

from __future__ import annotations

import ctypes
import os
import random
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.fakes.cuda.zoo.structures import (
    DEVICE_ORDINAL,
    DEVICE_POINTER,
    IS_MANAGED,
    MEMORY_TYPE,
    ON_GPU,
    SYNC_MEMOPS,
    Access,
    Location,
    Operation,
)
from tests.fakes.cuda.zoo.visit import (
    ENDS_CHECKPOINTS,
    GRAIN,
    NONE,
    PIECE,
    READ_WRITE,
    ROOM,
    ROW,
    ROWS,
    Piece,
    Prepared,
    Visit,
    case,
)

EQUAL = 1
WAIT_32, WRITE_32 = 1, 2


@case("cuMemAlloc", "cuMemAllocAsync", ENDS_CHECKPOINTS)
def allocate(visit: Visit) -> Prepared:
    address = c_uint64()
    flags = (1,) if visit.name == ENDS_CHECKPOINTS else ()
    yield ctypes.byref(address), c_size_t(GRAIN), *flags
    assert Piece(visit.driver, address.value).keeps(os.urandom(PIECE))
    visit.driver.free(address.value)


@case("cuMemAllocPitch")
def allocate_rows(visit: Visit) -> Prepared:
    address, pitch = c_uint64(), c_size_t()
    yield ctypes.byref(address), ctypes.byref(pitch), c_size_t(ROW - 1), c_size_t(ROWS), 4
    assert pitch.value >= ROW
    assert Piece(visit.driver, address.value, pitch.value * ROWS).keeps(os.urandom(pitch.value * ROWS))
    visit.driver.free(address.value)


@case("cuMemFree")
def free(visit: Visit) -> Prepared:
    yield (c_uint64(visit.driver.allocate()),)


@case("cuMemFreeAsync")
def free_in_order(visit: Visit) -> Prepared:
    address = c_uint64()
    visit.driver.call("cuMemAllocAsync", ctypes.byref(address), c_size_t(GRAIN), visit.stream)
    yield (address,)


@case("cuMemGetAddressRange")
def find_range(visit: Visit) -> Prepared:
    start, size = c_uint64(), c_size_t()
    yield ctypes.byref(start), ctypes.byref(size), c_uint64(visit.room + ROOM // 2)
    assert (start.value, size.value) == (visit.room, ROOM)


@case("cuPointerGetAttribute")
def look_at_pointer(visit: Visit) -> Prepared:
    kind = c_int()
    yield ctypes.byref(kind), MEMORY_TYPE, visit.piece().at
    assert kind.value == ON_GPU


@case("cuPointerGetAttributes")
def look_at_pointer_more(visit: Visit) -> Prepared:
    piece = visit.piece()
    kind, pointer, managed, device = c_int(), c_uint64(), c_uint(1), c_int(-1)
    asked = (c_int * 4)(MEMORY_TYPE, DEVICE_POINTER, IS_MANAGED, DEVICE_ORDINAL)
    answers = (c_void_p * 4)(*map(ctypes.addressof, (kind, pointer, managed, device)))
    yield 4, asked, answers, piece.at
    assert (kind.value, pointer.value, managed.value & 1, device.value) == (ON_GPU, piece.address, 0, 0)


@case("cuPointerSetAttribute")
def set_on_pointer(visit: Visit) -> Prepared:
    yield ctypes.byref(c_uint(1)), SYNC_MEMOPS, visit.piece().at


@case("cuMemAddressReserve")
def reserve(visit: Visit) -> Prepared:
    address = c_uint64()
    yield ctypes.byref(address), c_size_t(GRAIN), c_size_t(), NONE, NONE
    visit.driver.call("cuMemAddressFree", address, c_size_t(GRAIN))


@case("cuMemAddressFree")
def give_addresses_back(visit: Visit) -> Prepared:
    yield c_uint64(visit.reserve()), c_size_t(GRAIN)


@case("cuMemMap")
def map_memory(visit: Visit) -> Prepared:
    address, handle = visit.reserve(), visit.create()
    yield c_uint64(address), c_size_t(GRAIN), c_size_t(), handle, NONE
    visit.open(address)
    assert Piece(visit.driver, address).keeps(os.urandom(PIECE))
    visit.close(address, handle)


@case("cuMemSetAccess")
def open_memory(visit: Visit) -> Prepared:
    address, handle = visit.reserve(), visit.create()
    visit.map(address, handle)
    yield c_uint64(address), c_size_t(GRAIN), ctypes.byref(Access(Location(1, 0), READ_WRITE)), c_size_t(1)
    assert Piece(visit.driver, address).keeps(os.urandom(PIECE))
    visit.close(address, handle)


@case("cuMemGetAccess")
def look_at_access(visit: Visit) -> Prepared:
    """Of memory that the program maps itself: the driver reports no other."""
    address, handle, flags = visit.reserve(), visit.create(), c_uint64()
    visit.map(address, handle)
    visit.open(address)
    yield ctypes.byref(flags), ctypes.byref(Location(1, 0)), c_uint64(address)
    assert flags.value == READ_WRITE
    visit.close(address, handle)


@case("cuMemUnmap")
def unmap_memory(visit: Visit) -> Prepared:
    address, handle, content = visit.reserve(), visit.create(), os.urandom(PIECE)
    visit.map(address, handle)
    visit.open(address)
    Piece(visit.driver, address).write(content)
    yield c_uint64(address), c_size_t(GRAIN)
    visit.map(address, handle)
    visit.open(address)
    assert Piece(visit.driver, address).read() == content
    visit.close(address, handle)


@case("cuMemHostGetDevicePointer")
def address_for_gpu(visit: Visit) -> Prepared:
    address, host = c_uint64(), visit.pinned(bytes(PIECE))
    yield ctypes.byref(address), host, 0
    assert address.value == host.value
    visit.driver.call("cuMemFreeHost", host)


@case("cuStreamWriteValue32", "cuStreamWriteValue64")
def write_value(visit: Visit) -> Prepared:
    content = os.urandom(PIECE)
    piece, value = visit.piece(content), random.getrandbits(32)
    yield visit.stream, piece.at, c_uint64(value), 0
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read()[:4] == value.to_bytes(4, "little")
    assert piece.read()[8:] == content[8:]


@case("cuStreamWaitValue32", "cuStreamWaitValue64")
def wait_for_value(visit: Visit) -> Prepared:
    piece = visit.piece((7).to_bytes(8, "little") + bytes(PIECE - 8))
    yield visit.stream, piece.at, c_uint64(7), EQUAL
    visit.driver.call("cuStreamSynchronize", visit.stream)


@case("cuStreamBatchMemOp")
def values_in_a_batch(visit: Visit) -> Prepared:
    piece, value = visit.piece(bytes(PIECE)), random.getrandbits(32)
    operations = (Operation * 2)(
        Operation(WAIT_32, piece.address, 0, EQUAL), Operation(WRITE_32, piece.address, value, 0)
    )
    yield visit.stream, 2, operations, 0
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read()[:4] == value.to_bytes(4, "little")

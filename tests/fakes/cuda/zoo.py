#!/usr/bin/env python3
"""Make the calls on device memory that programs make, and check what each has done: `zoo.py`.

Each call has a case: what it needs, its arguments, and what must be true afterwards. Functions of the driver are looked
up as libcudart does it, by cuGetProcAddress. Asked on the standard input, a line each, and answered by a line:
    cases               the names of all cases; the first word of each is the function that it calls
    prepare NAME, ...   gets what these need, on as many streams
    call                has each called, in a thread of its own; answers when all are about to
    answers             tells which have returned by now, as NAME=CODE, ...
    check               tells "right", or which case is not
    loop COUNT          runs random cases in COUNT threads, from then on
    count               tells how many cases the threads have run
    stop                lets the threads end; tells the same
A case of the threads that fails, or is not right, ends the program with a line that tells so.
Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

VERSION = 13000  # of the interface that functions are asked for in
MIB = 1 << 20
GRAIN = 2 * MIB
ROW, ROWS, PLANES = 256, 100, 4
PIECE = ROW * ROWS * PLANES
ROOM = 16 * MIB  # pieces of it lie across borders of what it may consist of
PAUSES, LONGEST_PAUSE = 0.2, 0.05  # of a thread, s: else it is always in a call when a lock comes
ON_HOST, ON_CARD = 1, 2
MEMORY_TYPE, DEVICE_POINTER, SYNC_MEMOPS, IS_MANAGED, DEVICE_ORDINAL = 2, 3, 6, 8, 9
EQUAL = 1
WAIT_32, WRITE_32 = 1, 2
READ_WRITE = 3
NONE = c_uint64()

Prepared = Iterator[tuple[Any, ...]]  # yields the arguments of its call, and goes on with the checks
cases: dict[str, Callable[[Visit], Prepared]] = {}
ENDS_CHECKPOINTS = "cuMemAllocManaged"  # what the driver cannot restore: not in a loop


class Location(ctypes.Structure):
    """CUmemLocation: a device."""

    _fields_ = (("type", c_int), ("id", c_int))


class Wanted(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Side2D(ctypes.Structure):
    """One end of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("pitch", c_size_t),
    )


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", Side2D), ("target", Side2D), ("width", c_size_t), ("height", c_size_t))


class Side3D(ctypes.Structure):
    """One end of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", Side3D),
        ("target", Side3D),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("to", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a wait or a write."""

    _fields_ = (
        ("kind", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("rest", c_uint64),
    )


class Order(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))


class Failed(Exception):
    """A call that is not the subject of a case did not succeed."""


class Driver:
    """The driver's functions, and one context."""

    def __init__(self) -> None:
        self._find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
        self._known: dict[str, Any] = {}
        self.context = c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def code(self, name: str, *arguments: Any) -> int:
        if name not in self._known:
            found = c_void_p()
            if self._find(name.encode(), ctypes.byref(found), VERSION, NONE, None):
                raise Failed(f"there is no {name}")
            self._known[name] = ctypes.CFUNCTYPE(c_int)(found.value)
        result: int = self._known[name](*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code:
            raise Failed(f"{name} failed: {code}")

    def allocate(self, size: int = GRAIN) -> int:
        address = c_uint64()
        self.call("cuMemAlloc", ctypes.byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree", c_uint64(address))

    def stream(self) -> c_void_p:
        stream = c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream


class Piece:
    """Device memory: `at` is what a call takes."""

    def __init__(self, driver: Driver, address: int, size: int = PIECE) -> None:
        self._driver, self.address, self.size = driver, address, size

    @property
    def at(self) -> c_uint64:
        return c_uint64(self.address)

    def write(self, content: bytes) -> None:
        self._driver.call("cuMemcpyHtoD", self.at, content, c_size_t(len(content)))

    def read(self) -> bytes:
        copy = ctypes.create_string_buffer(self.size)
        self._driver.call("cuMemcpyDtoH", copy, self.at, c_size_t(self.size))
        return copy.raw

    def keeps(self, content: bytes) -> bool:
        self.write(content)
        return self.read()[: len(content)] == content


class Visit:
    """What a case may use: the driver, a stream, and memory of a room that is its own."""

    def __init__(self, driver: Driver, room: int, stream: c_void_p) -> None:
        self.driver, self.room, self.stream, self.name = driver, room, stream, ""
        self._used = 0

    def begin(self, name: str) -> tuple[Prepared, tuple[Any, ...]]:
        """Prepare the case of a name, and return it and the arguments of its call: a stream ends those of Async."""
        self.name = name
        body = cases[name](self)
        arguments = next(body)
        return body, (*arguments, self.stream) if name.split()[0].endswith("Async") else arguments

    def clear(self) -> None:
        """Give all pieces up."""
        self._used = 0

    def piece(self, content: bytes = b"") -> Piece:
        """Return PIECE bytes of the room; what is not given of their content is random."""
        piece = Piece(self.driver, self.room + self._used)
        self._used += PIECE
        if self._used > ROOM:
            raise Failed("the room is full")
        piece.write(content or os.urandom(PIECE))
        return piece

    def pinned(self, content: bytes) -> c_void_p:
        """Return host memory that the driver has made."""
        host = c_void_p()
        self.driver.call("cuMemHostAlloc", ctypes.byref(host), c_size_t(PIECE), 0)
        ctypes.memmove(host, content, PIECE)
        return host

    def reserve(self) -> int:
        address = c_uint64()
        self.driver.call("cuMemAddressReserve", ctypes.byref(address), c_size_t(GRAIN), c_size_t(), NONE, NONE)
        return address.value

    def create(self) -> c_uint64:
        handle = c_uint64()
        wanted = Wanted(1, 0, Location(1, 0))
        self.driver.call("cuMemCreate", ctypes.byref(handle), c_size_t(GRAIN), ctypes.byref(wanted), NONE)
        return handle

    def map(self, address: int, handle: c_uint64) -> None:
        self.driver.call("cuMemMap", c_uint64(address), c_size_t(GRAIN), c_size_t(), handle, NONE)

    def open(self, address: int) -> None:
        access = Access(Location(1, 0), READ_WRITE)
        self.driver.call("cuMemSetAccess", c_uint64(address), c_size_t(GRAIN), ctypes.byref(access), c_size_t(1))

    def close(self, address: int, handle: c_uint64) -> None:
        """Undo create, reserve and map."""
        self.driver.call("cuMemUnmap", c_uint64(address), c_size_t(GRAIN))
        self.driver.call("cuMemRelease", handle)
        self.driver.call("cuMemAddressFree", c_uint64(address), c_size_t(GRAIN))


def case(*names: str) -> Callable[[Callable[[Visit], Prepared]], Callable[[Visit], Prepared]]:
    def add(body: Callable[[Visit], Prepared]) -> Callable[[Visit], Prepared]:
        cases.update(dict.fromkeys(names, body))
        return body

    return add


SIZE = c_size_t(PIECE)


@case("cuMemcpyHtoD", "cuMemcpyHtoDAsync")
def copy_in(visit: Visit) -> Prepared:
    piece, content = visit.piece(), os.urandom(PIECE)
    yield piece.at, content, SIZE
    assert piece.read() == content


@case("cuMemcpyHtoDAsync pinned")
def copy_in_pinned(visit: Visit) -> Prepared:
    piece, content = visit.piece(), os.urandom(PIECE)
    host = visit.pinned(content)
    yield piece.at, host, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read() == content
    visit.driver.call("cuMemFreeHost", host)


@case("cuMemcpyDtoH", "cuMemcpyDtoHAsync")
def copy_out(visit: Visit) -> Prepared:
    content, target = os.urandom(PIECE), ctypes.create_string_buffer(PIECE)
    yield target, visit.piece(content).at, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert target.raw == content


@case("cuMemcpyDtoHAsync registered")
def copy_out_registered(visit: Visit) -> Prepared:
    content, target, event = os.urandom(PIECE), ctypes.create_string_buffer(PIECE), c_void_p()
    visit.driver.call("cuMemHostRegister", target, SIZE, 0)
    visit.driver.call("cuEventCreate", ctypes.byref(event), 2)
    yield target, visit.piece(content).at, SIZE
    visit.driver.call("cuEventRecord", event, visit.stream)
    visit.driver.call("cuEventSynchronize", event)
    assert target.raw == content
    visit.driver.call("cuEventDestroy", event)
    visit.driver.call("cuMemHostUnregister", target)


@case("cuMemcpyDtoD", "cuMemcpyDtoDAsync", "cuMemcpy", "cuMemcpyAsync")
def copy_across(visit: Visit) -> Prepared:
    content, target = os.urandom(PIECE), visit.piece()
    yield target.at, visit.piece(content).at, SIZE
    assert target.read() == content


@case("cuMemcpy to pinned", "cuMemcpyAsync to pinned")
def copy_unified(visit: Visit) -> Prepared:
    content, address = os.urandom(PIECE), c_uint64()
    host = visit.pinned(bytes(PIECE))
    visit.driver.call("cuMemHostGetDevicePointer", ctypes.byref(address), host, 0)
    yield address, visit.piece(content).at, SIZE
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert ctypes.string_at(host, PIECE) == content
    visit.driver.call("cuMemFreeHost", host)


@case("cuMemcpyPeer", "cuMemcpyPeerAsync")
def copy_to_peer(visit: Visit) -> Prepared:
    content, target, context = os.urandom(PIECE), visit.piece(), visit.driver.context
    yield target.at, context, visit.piece(content).at, context, SIZE
    assert target.read() == content


@case("cuMemcpyBatchAsync")
def copy_batch(visit: Visit) -> Prepared:
    contents = [os.urandom(PIECE) for _ in range(2)]
    targets, sources = [visit.piece() for _ in contents], [visit.piece(content) for content in contents]
    addresses = [(c_uint64 * 2)(*(piece.address for piece in pieces)) for pieces in (targets, sources)]
    yield *addresses, (c_size_t * 2)(PIECE, PIECE), c_size_t(2), Order(1), (c_size_t * 1)(0), c_size_t(1)
    assert [target.read() for target in targets] == contents


@case("cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy2DAsync")
def copy_rows(visit: Visit) -> Prepared:
    """Of the left half of a device's rows, into the right half of others."""
    half, rows = ROW // 2, ROWS * PLANES
    content, old = os.urandom(PIECE), os.urandom(PIECE)
    source, target = visit.piece(content), visit.piece(old)
    ends = Side2D(0, 0, ON_CARD, None, source.address, None, ROW), Side2D(half, 0, ON_CARD, 0, target.address, 0, ROW)
    yield (ctypes.byref(Copy2D(*ends, half, rows)),)
    assert target.read() == b"".join(old[at : at + half] + content[at : at + half] for at in range(0, PIECE, ROW))


def box(source: Side3D, target: Side3D) -> Copy3D:
    return Copy3D(source, target, ROW, ROWS, PLANES)


@case("cuMemcpy3D", "cuMemcpy3DAsync")
def copy_box(visit: Visit) -> Prepared:
    """From the host."""
    content, target = os.urandom(PIECE), visit.piece()
    host = ctypes.create_string_buffer(content, PIECE)
    source = Side3D(0, 0, 0, 0, ON_HOST, ctypes.addressof(host), 0, None, None, ROW, ROWS)
    yield (ctypes.byref(box(source, Side3D(0, 0, 0, 0, ON_CARD, 0, target.address, 0, 0, ROW, ROWS))),)
    assert target.read() == content


def fill_case(bits: int, kind: Any) -> None:
    value, step = random.getrandbits(bits), bits // 8

    @case(f"cuMemsetD{bits}", f"cuMemsetD{bits}Async")
    def fill(visit: Visit) -> Prepared:
        piece = visit.piece()
        yield piece.at, kind(value), c_size_t(PIECE // step)
        assert piece.read() == value.to_bytes(step, "little") * (PIECE // step)

    @case(f"cuMemsetD2D{bits}", f"cuMemsetD2D{bits}Async")
    def fill_rows(visit: Visit) -> Prepared:
        old, half = os.urandom(PIECE), ROW // 2
        piece = visit.piece(old)
        yield piece.at, c_size_t(ROW), kind(value), c_size_t(half // step), c_size_t(ROWS * PLANES)
        left = value.to_bytes(step, "little") * (half // step)
        assert piece.read() == b"".join(left + old[at + half : at + ROW] for at in range(0, PIECE, ROW))


for bits, kind in ((8, c_ubyte), (16, c_ushort), (32, c_uint)):
    fill_case(bits, kind)


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
    assert kind.value == ON_CARD


@case("cuPointerGetAttributes")
def look_at_pointer_more(visit: Visit) -> Prepared:
    piece = visit.piece()
    kind, pointer, managed, device = c_int(), c_uint64(), c_uint(1), c_int(-1)
    asked = (c_int * 4)(MEMORY_TYPE, DEVICE_POINTER, IS_MANAGED, DEVICE_ORDINAL)
    answers = (c_void_p * 4)(*map(ctypes.addressof, (kind, pointer, managed, device)))
    yield 4, asked, answers, piece.at
    assert (kind.value, pointer.value, managed.value & 1, device.value) == (ON_CARD, piece.address, 0, 0)


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
    """Of memory that the program maps itself: the driver tells it of no other."""
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
def address_for_card(visit: Visit) -> Prepared:
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


class Graph:
    """A graph, which is run once, and its end."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.handle, self.node, self.executable = driver, c_void_p(), c_void_p(), c_void_p()
        driver.call("cuGraphCreate", ctypes.byref(self.handle), 0)

    def add(self, kind: str, parameters: ctypes.Structure) -> None:
        self._driver.call(f"cuGraphAdd{kind}Node", *self.arguments(parameters))

    def arguments(self, parameters: ctypes.Structure) -> tuple[Any, ...]:
        return (ctypes.byref(self.node), self.handle, None, c_size_t(), ctypes.byref(parameters), self._driver.context)

    def instantiate(self) -> None:
        self._driver.call("cuGraphInstantiate", ctypes.byref(self.executable), self.handle, NONE)

    def run(self, stream: c_void_p) -> None:
        self.instantiate()
        self._driver.call("cuGraphLaunch", self.executable, stream)
        self._driver.call("cuStreamSynchronize", stream)

    def destroy(self) -> None:
        self._driver.call("cuGraphExecDestroy", self.executable)
        self._driver.call("cuGraphDestroy", self.handle)


def device_copy(source: Piece, target: Piece) -> Copy3D:
    return box(*(Side3D(0, 0, 0, 0, ON_CARD, None, piece.address, None, None, ROW, ROWS) for piece in (source, target)))


@case("cuGraphAddMemcpyNode")
def copy_in_graph(visit: Visit) -> Prepared:
    content, target, graph = os.urandom(PIECE), visit.piece(), Graph(visit.driver)
    yield graph.arguments(device_copy(visit.piece(content), target))
    graph.run(visit.stream)
    assert target.read() == content
    graph.destroy()


@case("cuGraphAddMemsetNode")
def fill_in_graph(visit: Visit) -> Prepared:
    piece, graph = visit.piece(), Graph(visit.driver)
    yield graph.arguments(Fill(piece.address, 0, 0x55, 1, PIECE, 1))
    graph.run(visit.stream)
    assert piece.read() == b"\x55" * PIECE
    graph.destroy()


@case("cuGraphLaunch")
def launch_graph(visit: Visit) -> Prepared:
    content, target, graph = os.urandom(PIECE), visit.piece(), Graph(visit.driver)
    graph.add("Memcpy", device_copy(visit.piece(content), target))
    graph.instantiate()
    yield graph.executable, visit.stream
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert target.read() == content
    graph.destroy()


@case("cuLaunchKernel")
def launch_kernel(visit: Visit) -> Prepared:
    """Of a pretended card's own kernel: it needs no module that a compiler has made."""
    words, module, kernel = random.getrandbits(32), c_void_p(), c_void_p()
    piece, count = visit.piece(words.to_bytes(4, "little") * (PIECE // 4)), c_uint64(PIECE // 4)
    visit.driver.call("cuModuleLoadData", ctypes.byref(module), b"")
    visit.driver.call("cuModuleGetFunction", ctypes.byref(kernel), module, c_char_p(b"advance"))
    address = piece.at
    parameters = (c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
    yield kernel, 1, 1, 1, 1, 1, 1, 0, visit.stream, parameters, None
    visit.driver.call("cuStreamSynchronize", visit.stream)
    assert piece.read()[:4] == ((words * 1664525 + 1013904223) % 2**32).to_bytes(4, "little")


class Zoo:
    """Answers what is asked."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._prepared: dict[str, tuple[Prepared, tuple[Any, ...]]] = {}
        self._answers: dict[str, int] = {}
        self._about_to, self._go = threading.Semaphore(0), threading.Event()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._counts: list[int] = []

    def cases(self) -> str:
        return ", ".join(cases)

    def prepare(self, *names: str) -> str:
        visit = Visit(self._driver, self._driver.allocate(ROOM), c_void_p())
        for name in names:
            visit.stream = self._driver.stream()
            self._prepared[name] = visit.begin(name)
            threading.Thread(target=self._call, args=(name,), daemon=True).start()
            self._about_to.acquire()
        return "prepared"

    def call(self) -> str:
        self._go.set()
        for _ in self._prepared:
            self._about_to.acquire()
        return "called"

    def _call(self, name: str) -> None:
        self._driver.call("cuCtxSetCurrent", self._driver.context)
        self._about_to.release()
        self._go.wait()
        self._about_to.release()
        self._answers[name] = self._driver.code(name.split()[0], *self._prepared[name][1])

    def answers(self) -> str:
        return ", ".join(f"{name}={code}" for name, code in list(self._answers.items()))

    def check(self) -> str:
        for name, (body, _) in self._prepared.items():
            problem = verdict(body)
            if problem:
                return f"{name}: {problem}"
        return "right"

    def loop(self, count: str) -> str:
        self._counts = [0] * int(count)
        self._threads = [threading.Thread(target=self._loop, args=(i,), daemon=True) for i in range(int(count))]
        for thread in self._threads:
            thread.start()
        return "looping"

    def _loop(self, number: int) -> None:
        name = "cuCtxSetCurrent"
        names = [name for name in cases if name != ENDS_CHECKPOINTS]
        try:
            self._driver.call(name, self._driver.context)
            visit = Visit(self._driver, self._driver.allocate(ROOM), self._driver.stream())
            while not self._stopped.is_set():
                name = random.choice(names)
                self._run(name, visit)
                visit.clear()
                self._counts[number] += 1
                if random.random() < PAUSES:
                    time.sleep(random.uniform(0, LONGEST_PAUSE))
        except Failed as error:
            give_up(f"{name}: {error}")

    def _run(self, name: str, visit: Visit) -> None:
        body, arguments = visit.begin(name)
        self._driver.call(name.split()[0], *arguments)
        problem = verdict(body)
        if problem:
            give_up(f"{name}: {problem}")

    def count(self) -> str:
        return str(sum(self._counts))

    def stop(self) -> str:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return self.count()


def verdict(body: Prepared) -> str:
    """Run a case's checks, and return what is wrong, if anything."""
    try:
        next(body, None)
    except AssertionError as error:
        return f"it has not done what it should {error}".strip()
    except Failed as error:
        return str(error)
    return ""


def give_up(problem: str) -> None:
    os.write(1, f"{problem}\n".encode())
    os._exit(3)  # from any thread


def main() -> None:
    zoo = Zoo()
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        print(getattr(zoo, verb)(*(rest.split(", ") if rest else ())), flush=True)


if __name__ == "__main__":
    main()

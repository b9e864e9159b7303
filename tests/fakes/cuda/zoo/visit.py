"""What a case may use: the driver by its own look-up, a stream, memory that is checked; and the table of cases."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from tests.fakes.cuda.zoo.structures import Access, Location, Wanted

VERSION = 13000  # of the interface that functions are asked for in
MIB = 1 << 20
GRAIN = 2 * MIB
ROW, ROWS, PLANES = 256, 100, 4
PIECE = ROW * ROWS * PLANES
ROOM = 16 * MIB  # pieces of it lie across borders of what it may consist of
READ_WRITE = 3
NONE = c_uint64()
Prepared = Iterator[tuple[Any, ...]]  # yields the arguments of its call, and continues with the checks
ENDS_CHECKPOINTS = "cuMemAllocManaged"  # what the driver cannot restore: not in a loop
cases: dict[str, Callable[[Visit], Prepared]] = {}


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

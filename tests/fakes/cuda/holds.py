#!/usr/bin/env python3
"""Hold memory of a GPU and do with it what is asked: `holds.py PIECES [ALLOCATIONS]`.

The pieces, of 2 MiB each, are all zeros at first, and belong to so many allocations of one size, 1 by default.

Asked on the standard input, a line each, and answered by a line:
    fill PIECE VALUE    every byte of the piece becomes VALUE
    content             reports the value of each piece, "?" where its bytes differ
    renew               frees the memory, and allocates it again
    churn               from then on, in a thread of its own, allocates and frees a piece without a pause, and makes,
                        maps, fills, unmaps and releases another one
    make                makes a piece of memory that is mapped nowhere, and reserves addresses for it
    map, open, write, close, release
                        maps it there, lets the GPU read and write it, does that, unmaps it, gives it up
    share               makes a piece of memory, and maps it a second time as another process would that it is handed to
    unshare             gives that second mapping up
    look                asks how much memory is free
Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

PIECE = 2 << 20
SIZE, NONE = ctypes.c_size_t(PIECE), ctypes.c_uint64()


class Wanted(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


class Held:
    """The memory, in the GPU's primary context; a failing call ends the program."""

    def __init__(self, pieces: int, allocations: int = 1) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._memory: list[int] = []  # addresses
        self._allocations = allocations
        self._bytes = pieces // allocations * PIECE  # of each
        self._imported, self._second = ctypes.c_uint64(), 0  # the handle of `share`, and the address
        self._made, self._place = ctypes.c_uint64(), ctypes.c_uint64()  # the handle of `make`, and the addresses
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxSetCurrent", self._context)
        self.allocate()

    def allocate(self) -> None:
        for _ in range(self._allocations):
            address = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self._bytes))
            self._memory.append(address.value)

    def renew(self) -> str:
        while self._memory:
            self._call("cuMemFree_v2", ctypes.c_uint64(self._memory.pop()))
        self.allocate()
        return "renewed"

    def churn(self) -> str:
        threading.Thread(target=self._churn, daemon=True).start()
        return "churning"

    def _churn(self) -> None:
        address = ctypes.c_uint64()
        self._call("cuCtxSetCurrent", self._context)
        while True:
            self._call("cuMemAlloc_v2", ctypes.byref(address), SIZE)
            self._call("cuMemFree_v2", address)
            for step in (self.make, self.map, self.open, self.write, self.close, self.release):
                step()

    def make(self) -> str:
        wanted = Wanted(1, 0, 1, 0)
        self._call("cuMemAddressReserve", ctypes.byref(self._place), SIZE, ctypes.c_size_t(), NONE, NONE)
        self._call("cuMemCreate", ctypes.byref(self._made), SIZE, ctypes.byref(wanted), NONE)
        return "made"

    def map(self) -> str:
        self._call("cuMemMap", self._place, SIZE, ctypes.c_size_t(), self._made, NONE)
        return "mapped"

    def open(self) -> str:
        self._call("cuMemSetAccess", self._place, SIZE, ctypes.byref(Access(1, 0, 3)), ctypes.c_size_t(1))
        return "open"

    def write(self) -> str:
        self._call("cuMemsetD8_v2", self._place, ctypes.c_ubyte(1), SIZE)
        return "written"

    def close(self) -> str:
        self._call("cuMemUnmap", self._place, SIZE)
        return "closed"

    def release(self) -> str:
        self._call("cuMemRelease", self._made)
        self._call("cuMemAddressFree", self._place, SIZE)
        return "released"

    def share(self) -> str:
        made, fd, address = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(made), SIZE, ctypes.byref(Wanted(1, 1, 1, 0)), NONE)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), made, 1, NONE)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(self._imported), ctypes.c_void_p(fd.value), 1)
        os.close(fd.value)
        self._call("cuMemAddressReserve", ctypes.byref(address), SIZE, ctypes.c_size_t(), NONE, NONE)
        self._call("cuMemMap", address, SIZE, ctypes.c_size_t(), self._imported, NONE)
        self._second = address.value
        return "shared"

    def unshare(self) -> str:
        self._call("cuMemUnmap", ctypes.c_uint64(self._second), SIZE)
        self._call("cuMemRelease", self._imported)
        return "not shared"

    def look(self) -> str:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return f"{free.value} of {total.value}"

    def fill(self, piece: str, value: str) -> str:
        allocation, offset = divmod(int(piece) * PIECE, self._bytes)
        address = ctypes.c_uint64(self._memory[allocation] + offset)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(int(value)), ctypes.c_size_t(PIECE))
        return "filled"

    def content(self) -> str:
        copy = bytearray(self._bytes)
        target = (ctypes.c_char * 1).from_buffer(copy)
        values = []
        for address in self._memory:
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(self._bytes))
            values += [self._value(copy[at : at + PIECE]) for at in range(0, self._bytes, PIECE)]
        return " ".join(values)

    @staticmethod
    def _value(piece: bytearray) -> str:
        return str(piece[0]) if piece.count(piece[0]) == PIECE else "?"

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            os.write(2, f"{name} failed: {result}\n".encode())
            os._exit(1)  # from any thread


def main() -> None:
    held = Held(*map(int, sys.argv[1:]))
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(held, verb)(*arguments), flush=True)


if __name__ == "__main__":
    main()

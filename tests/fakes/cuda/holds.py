#!/usr/bin/env python3
"""Hold memory of a card and do with it what is asked: `holds.py PIECES [ALLOCATIONS]`.

The pieces, of 2 MiB each, are all zeros at first, and belong to so many allocations of one size, 1 by default.

Asked on the standard input, a line each, and answered by a line:
    fill PIECE VALUE    every byte of the piece becomes VALUE
    content             tells the value of each piece, "?" where its bytes differ
    renew               frees the memory, and allocates it again
    churn               allocates and frees a piece without a pause from then on, in a thread of its own
    share               makes a piece of memory, and maps it a second time as another process would that it is handed to
    unshare             gives that second mapping up
Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

PIECE = 2 << 20


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


class Held:
    """The memory, in the card's primary context; a failing call ends the program."""

    def __init__(self, pieces: int, allocations: int = 1) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._memory: list[int] = []  # addresses
        self._allocations = allocations
        self._bytes = pieces // allocations * PIECE  # of each
        self._imported, self._second = ctypes.c_uint64(), 0  # the handle of `share`, and the address
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
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(PIECE))
            self._call("cuMemFree_v2", address)

    def share(self) -> str:
        made, fd, address = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_uint64()
        size, none = ctypes.c_size_t(PIECE), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(made), size, ctypes.byref(Wanted(1, 1, 1, 0)), none)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), made, 1, none)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(self._imported), ctypes.c_void_p(fd.value), 1)
        os.close(fd.value)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(), none, none)
        self._call("cuMemMap", address, size, ctypes.c_size_t(), self._imported, none)
        self._second = address.value
        return "shared"

    def unshare(self) -> str:
        self._call("cuMemUnmap", ctypes.c_uint64(self._second), ctypes.c_size_t(PIECE))
        self._call("cuMemRelease", self._imported)
        return "not shared"

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

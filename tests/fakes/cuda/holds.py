#!/usr/bin/env python3
"""Hold memory of a card and do with it what is asked: `holds.py PIECES`, of 2 MiB each, all zeros at first.

Asked on the standard input, a line each, and answered by a line:
    fill PIECE VALUE    every byte of the piece becomes VALUE
    content             tells the value of each piece, "?" where its bytes differ
    renew               frees the memory, and allocates it again
Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import sys

PIECE = 2 << 20


class Held:
    """The memory, in the card's primary context; a failing call ends the program."""

    def __init__(self, pieces: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._memory = ctypes.c_uint64()
        self._bytes = pieces * PIECE
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self.allocate()

    def allocate(self) -> None:
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(self._bytes))

    def renew(self) -> str:
        self._call("cuMemFree_v2", self._memory)
        self.allocate()
        return "renewed"

    def fill(self, piece: str, value: str) -> str:
        address = ctypes.c_uint64(self._memory.value + int(piece) * PIECE)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(int(value)), ctypes.c_size_t(PIECE))
        return "filled"

    def content(self) -> str:
        copy = bytearray(self._bytes)
        self._call("cuMemcpyDtoH_v2", (ctypes.c_char * 1).from_buffer(copy), self._memory, ctypes.c_size_t(self._bytes))
        return " ".join(self._value(copy[at : at + PIECE]) for at in range(0, self._bytes, PIECE))

    @staticmethod
    def _value(piece: bytearray) -> str:
        return str(piece[0]) if piece.count(piece[0]) == PIECE else "?"

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            sys.exit(f"{name} failed: {result}")


def main() -> None:
    held = Held(int(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(held, verb)(*arguments), flush=True)


if __name__ == "__main__":
    main()

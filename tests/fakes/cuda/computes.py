#!/usr/bin/env python3
"""Compute on a GPU and print a checksum per step, like computes.c, for images that hold Python and no C program.

`computes.py [MIB] [STEP_MS] [DEVICE,…]`. Needs only the standard library. Every word is advanced on the GPU; the host
knows the value of the first and the last word after each step, and the sum of all of them, and ends with status 3
when the GPU's memory disagrees. With STEPS_FROM in its environment, it waits for a line of that FIFO after each step. A
test workload.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from array import array
from pathlib import Path

FACTOR, OFFSET, WORD = 1664525, 1013904223, 2**32


class Gpu:
    """The calls of libcuda.so.1 that this program needs; a failing one ends the program with status 2."""

    def __init__(self, device: int, words: array[int]) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._memory = ctypes.c_uint64()
        self._count = ctypes.c_uint64(len(words))
        self._advance = ctypes.c_void_p()
        self._context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.use_in_this_thread()
        self._call("cuModuleLoadData", ctypes.byref(module), b"")
        self._call("cuModuleGetFunction", ctypes.byref(self._advance), module, b"advance")
        self._call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(self.bytes))
        self._call("cuMemcpyHtoD_v2", self._memory, words.tobytes(), ctypes.c_size_t(self.bytes))

    def use_in_this_thread(self) -> None:
        """Make its context the current one of the calling thread: CUDA keeps that for each thread."""
        self._call("cuCtxSetCurrent", self._context)

    @property
    def bytes(self) -> int:
        return self._count.value * 4

    def advance(self) -> array[int]:
        """Do one step on the GPU and return all words."""
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(self._memory), ctypes.addressof(self._count))
        self._call("cuLaunchKernel", self._advance, 1, 1, 1, 1, 1, 1, 0, None, pointers, None)
        copy = ctypes.create_string_buffer(self.bytes)
        self._call("cuMemcpyDtoH_v2", copy, self._memory, ctypes.c_size_t(self.bytes))
        return array("I", copy.raw)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            print(f"{name} failed: {result}", flush=True)
            sys.exit(2)


def main() -> None:
    mib, pause_ms, devices = sys.argv[1:] + ["1", "20", "0"][len(sys.argv) - 1 :]
    first = array("I", ((index * 2654435761 + 1) % WORD for index in range(int(mib) << 18)))
    gpus = [Gpu(int(device), first) for device in devices.split(",")]
    factor, offset, total = 1, 0, sum(first)
    step = 0
    while True:
        step += 1
        factor, offset = factor * FACTOR % WORD, (offset * FACTOR + OFFSET) % WORD
        expected = (total * factor + offset * len(first)) % WORD
        for gpu in gpus:
            gpu.use_in_this_thread()
            words = gpu.advance()
            edges = all(words[i] == (first[i] * factor + offset) % WORD for i in (0, len(words) - 1))
            if not edges or sum(words) % WORD != expected:
                print(f"wrong: memory at step {step}", flush=True)
                sys.exit(3)
        print(f"step {step} checksum {expected:08x}", flush=True)
        if asked := os.environ.get("STEPS_FROM"):
            with Path(asked).open() as lines:
                lines.readline()
        else:
            time.sleep(int(pause_ms) / 1000)


if __name__ == "__main__":
    main()

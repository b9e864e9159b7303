#!/usr/bin/env python3
"""Compute on a GPU and have forked children do a share of the work, as a training program with data loaders does.

Prints `step N` a step when every child has answered rightly. Children of all of multiprocessing's start methods, a
Pool, a lock and shared memory in /dev/shm take part; a persistent forked worker remembers what the driver's host memory
held when it was forked, and reads it again each time.
Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

BYTES = 64 << 10
CONTENT = bytes(range(256)) * (BYTES // 256)


def square(number: int) -> int:
    return number * number


def serve(requests, answers, lock, shared, address: int) -> None:
    """Answer numbers by their squares; `address` is of inherited host memory, 0 for none."""
    while True:
        number = requests.get()
        with lock:
            shared.buf[0] = number % 256
        whole = not address or ctypes.string_at(address, BYTES) == CONTENT
        answers.put(number * number if whole else -1)


class Child:
    def __init__(self, method: str, address: int) -> None:
        context = multiprocessing.get_context(method)
        self.requests, self.answers = context.Queue(), context.Queue()
        self.shared = SharedMemory(create=True, size=4096)
        self.lock = context.Lock()
        arguments = (self.requests, self.answers, self.lock, self.shared, address)
        context.Process(target=serve, args=arguments, daemon=True).start()

    def is_right(self, number: int) -> bool:
        self.requests.put(number)
        return self.answers.get(timeout=60) == number * number and self.shared.buf[0] == number % 256


def main() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    library.fakeHostMemory.restype = ctypes.c_void_p
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    for failed in (
        library.cuInit(0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        library.cuCtxSetCurrent(context),
        library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 20)),
    ):
        if failed:
            sys.exit(f"CUDA failed: {failed}")
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()  # a parent with threads of its own
    address = library.fakeHostMemory() or 0
    if address:
        ctypes.memmove(address, CONTENT, BYTES)
    children = [Child("fork", address), Child("fork", address), Child("forkserver", 0), Child("spawn", 0)]
    pool = multiprocessing.get_context("fork").Pool(2)
    step = 0
    while True:
        step += 1
        right = False not in [child.is_right(step) for child in children]  # each is asked
        right = right and pool.map(square, [step, step + 1]) == [step * step, (step + 1) ** 2]
        library.cuMemsetD8_v2(memory, ctypes.c_ubyte(step % 256), ctypes.c_size_t(2 << 20))
        copy = ctypes.create_string_buffer(2 << 20)
        library.cuMemcpyDtoH_v2(copy, memory, ctypes.c_size_t(2 << 20))
        right = right and copy.raw.count(bytes([step % 256])) == 2 << 20
        print(f"step {step} checksum 0" if right else f"wrong: step {step}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compute on a GPU, and fork workers again for each epoch, as a data loader without persistent workers does.

Prints `step N` an epoch when all workers of it have answered rightly and have ended. The argument is how many workers
there are. Needs only the standard library. A test workload.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time

LOADING = 0.3  # seconds: a loader's worker is mostly busy when a checkpoint comes


def serve(requests, answers) -> None:
    for number in iter(requests.get, None):
        time.sleep(LOADING)
        answers.put(number * number)


def epoch(context, count: int, number: int) -> bool:
    requests, answers = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=serve, args=(requests, answers), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for one in range(count):
        requests.put(number + one)
    found = sorted(answers.get() for _ in workers)
    for _ in workers:
        requests.put(None)
    for worker in workers:
        worker.join()
    ended = all(worker.exitcode == 0 for worker in workers)
    return ended and found == [(number + one) ** 2 for one in range(count)]


def main() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    for failed in (
        library.cuInit(0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        library.cuCtxSetCurrent(context),
        library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 20)),
    ):
        if failed:
            sys.exit(f"CUDA failed: {failed}")
    step = 0
    while True:
        step += 1
        right = epoch(multiprocessing.get_context("fork"), int(sys.argv[1]), step)
        library.cuMemsetD8_v2(memory, ctypes.c_ubyte(step % 256), ctypes.c_size_t(2 << 20))
        copy = ctypes.create_string_buffer(2 << 20)
        library.cuMemcpyDtoH_v2(copy, memory, ctypes.c_size_t(2 << 20))
        right = right and copy.raw.count(bytes([step % 256])) == 2 << 20
        print(f"step {step} checksum 0" if right else f"wrong: step {step}", flush=True)


if __name__ == "__main__":
    main()

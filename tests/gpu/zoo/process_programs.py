"""Programs of several processes. Each process proves its own figures; the parent ends with the first that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import Structure, byref, c_char, c_uint, c_uint64
from pathlib import Path
from typing import Any

from tests.gpu.zoo.driver_programs import kernels
from tests.gpu.zoo.figures import Options, Round, require, say
from tests.gpu.zoo.gpu import MIB, Gpu
from tests.gpu.zoo.torch_programs import loaded

PAYLOAD = "tests.gpu.zoo.payload"
START_SECONDS = 60
RANKS = Path(__file__).parents[1] / "payload.py"


def end_with(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End this process when one of its children has ended."""

    def watch() -> None:
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
        say(f"wrong: a child ended with {[process.returncode for process in processes]}")
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def children(options: Options) -> Round:
    """Compute in parallel with two children that compute, too; the lines of this one begin with "2: " (--prefix)."""
    argv = [sys.executable, "-m", PAYLOAD, "kernels", "--mib", str(options.mib)]
    end_with([subprocess.Popen([*argv, "--prefix", f"{number}: "]) for number in range(2)])
    return kernels(options)


class _Handle(Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", c_char * 64),)


def ipc(options: Options) -> Round:
    """Share memory with another process through the driver: it is this program again, with the handle."""
    gpu = Gpu()
    if given := os.environ.get("ZOO_IPC"):
        handle, there = _Handle.from_buffer_copy(bytes.fromhex(given)), c_uint64()
        gpu("cuIpcOpenMemHandle_v2", byref(there), handle, c_uint(1))
        memory = there.value
    else:
        memory, handle = gpu.allocate(64 * MIB), _Handle()
        gpu.fill(memory, 9, 64 * MIB)
        gpu("cuIpcGetMemHandle", byref(handle), c_uint64(memory))
        argv = [sys.executable, "-m", PAYLOAD, "ipc", "--prefix", "1: "]
        end_with([subprocess.Popen(argv, env={**os.environ, "ZOO_IPC": bytes(handle).hex()})])

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            yield f"seen {number}", gpu.checksum(memory, MIB)
            time.sleep(0.02)

    return a_round


def _sum_shared(inbox: Any, outbox: Any) -> None:
    """Hold tensors of another process, and tell their sums whenever that is asked for."""
    held = inbox.get()
    outbox.put("held")
    while (number := inbox.get()) is not None:
        outbox.put(int(held[number % len(held)].sum()))


def torch_shared(options: Options) -> Round:
    """Share tensors with a child by torch.multiprocessing, and compare what it sees of them."""
    torch = loaded()
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    context.Process(target=_sum_shared, args=(inbox, outbox), daemon=True).start()
    count = options.mib * MIB // 4 // 4
    tensors = [torch.arange(count, dtype=torch.int64, device="cuda") + number for number in range(2)]
    torch.cuda.synchronize()
    inbox.put(tensors)
    require(outbox.get(timeout=START_SECONDS) == "held", "the child holds them")

    def a_round() -> Iterator[tuple[str, int]]:
        for number in range(20):
            inbox.put(number)
            there = outbox.get(timeout=START_SECONDS)
            require(there == int(tensors[number % 2].sum()), "the child sees the same")
            yield f"seen {number}", there

    return a_round


def nccl(options: Options) -> Round:
    """Become the two ranks of the scenarios' payload, over whatever NCCL chooses."""
    os.execv(sys.executable, [sys.executable, str(RANKS), "ranks", str(options.mib)])

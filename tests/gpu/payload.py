"""Computes on GPUs and proves it: `payload.py one MIB [GPU]` or `payload.py ranks MIB`, with torch.

Each step prints "step N sum X": a tensor of random integers is summed on the GPU and must give what it gave at first,
a matrix product is done, and a counter on the GPU must agree with the one here. A wrong figure ends the program, and
so does memory beyond its limit, of which it tries to get BEYOND_MIB. With STEPS_FROM it waits for a line of that FIFO
after each step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STEP_SECONDS = 0.1
PIECE = 64 << 20  # numbers added up together: a sum in 64 bits first makes a copy of twice the size


def one(mib: int, gpu: int, *, prefix: str = "", group: bool = False) -> None:
    """Compute forever on one GPU; with `group`, every step includes an all-reduce among the ranks."""
    import torch  # of the machine, as is its CUDA; only a container with a GPU gets here

    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    generator = torch.Generator(device=device).manual_seed(os.getpid())
    data = torch.randint(0, 1 << 30, (mib << 18,), dtype=torch.int32, device=device, generator=generator)
    weights = torch.rand((512, 512), device=device)

    def total() -> int:
        return int(sum(piece.sum(dtype=torch.int64) for piece in data.split(PIECE)))

    expected, product = total(), weights @ weights
    count, step = torch.zeros((), dtype=torch.int64, device=device), 0
    while True:
        step += 1
        count += 1
        if group:
            ones = torch.ones(1 << 20, device=device)
            torch.distributed.all_reduce(ones)
            require(int(ones.sum()) == torch.distributed.get_world_size() << 20, "all-reduce")
        require(total() == expected, "sum")
        require(torch.allclose(weights @ weights, product), "product")
        require(int(count) == step, "counter")
        if beyond := os.environ.get("BEYOND_MIB"):
            require_limit(int(beyond), device)
        sys.stdout.write(f"{prefix}step {step} sum {expected:x}\n")  # in one piece: the ranks share a pipe
        sys.stdout.flush()
        await_turn()


def several(mib: int) -> None:
    """Compute as `one`, on each GPU that there is, in one process."""
    import torch

    class Part:
        def __init__(self, gpu: int) -> None:
            generator = torch.Generator(device=f"cuda:{gpu}").manual_seed(os.getpid() + gpu)
            shape, kind = (mib << 18,), torch.int32
            self.data = torch.randint(0, 1 << 30, shape, dtype=kind, device=f"cuda:{gpu}", generator=generator)
            self.expected = self.total()

        def total(self) -> int:
            return int(sum(piece.sum(dtype=torch.int64) for piece in self.data.split(PIECE)))

    parts, step = [Part(gpu) for gpu in range(torch.cuda.device_count())], 0
    require(len(parts) > 1, "number of GPUs")
    while True:
        step += 1
        for part in parts:
            require(part.total() == part.expected, "sum")
        sys.stdout.write(f"step {step} sum {sum(part.expected for part in parts):x}\n")
        sys.stdout.flush()
        await_turn()


def await_turn() -> None:
    """Wait for a line of the FIFO that STEPS_FROM names, where it does."""
    if asked := os.environ.get("STEPS_FROM"):
        with Path(asked).open() as lines:
            lines.readline()
    else:
        time.sleep(STEP_SECONDS)


def require_limit(mib: int, device: object) -> None:
    """End the program where so much memory can be had, which it may not have."""
    import torch

    try:
        torch.empty(mib << 20, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    else:
        require(False, f"{mib} MiB beyond the limit were allocated")


def require(right: bool, what: str) -> None:
    if not right:
        print(f"wrong: {what}", flush=True)
        sys.exit(3)


def bring_loopback_up() -> None:
    """Switch `lo` on: a container of ctr has a network namespace of its own, where it is off."""
    import fcntl
    import socket
    import struct

    up = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def rank(number: int, world: int, mib: int) -> None:
    """Be one rank of an NCCL job, on the GPU of its number."""
    import torch

    torch.cuda.set_device(number)
    address = "tcp://127.0.0.1:29511"
    torch.distributed.init_process_group("nccl", init_method=address, rank=number, world_size=world)
    one(mib, number, prefix=f"{number}: ", group=True)


def processes(count: int, target: str, mib: int) -> None:
    """Run so many processes of this program, marked by their numbers, and end with the first that ends."""
    import subprocess

    started = [
        subprocess.Popen([sys.executable, __file__, target, str(mib), str(number), str(count)])
        for number in range(count)
    ]
    while all(process.poll() is None for process in started):
        time.sleep(0.2)
    sys.exit(4)


def main() -> None:
    what, mib, *rest = sys.argv[1:]
    match what:
        case "one":
            one(int(mib), int(rest[0]) if rest else 0)
        case "several":
            several(int(mib))
        case "marked":
            one(int(mib), 0, prefix=f"{rest[0]}: ")
        case "two":
            processes(2, "marked", int(mib))
        case "ranks":
            bring_loopback_up()
            processes(2, "rank", int(mib))
        case "rank":
            rank(int(rest[0]), int(rest[1]), int(mib))


if __name__ == "__main__":
    main()

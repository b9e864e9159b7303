"""Computes on a GPU without a pause, and checks everything: `run GIB CHANGED`, or `time` for what work costs.

`run` keeps GIB of random numbers, replays a CUDA graph, multiplies matrices, and allocates and frees all the while; a
step prints its number. On SIGUSR1 it makes new numbers of a share CHANGED of its memory, evenly spread in pieces of
2 MiB, and says "changed". A wrong sum, product or graph, or an error of CUDA, ends it with "wrong: …".
`time` prints, as JSON, seconds of an allocation with its free, of a step of training and of a step of inference.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

BLOCKS = 8
PIECE = 64 << 20  # numbers that are added up together: a sum in 64 bits makes a copy of twice the size
CHECK_SECONDS = 0.25
REPLAYS = 20
ROW = (2 << 20) // 4  # numbers of a piece that changes as a whole


def run(gib: float, changed: float) -> None:
    """Compute forever."""
    import torch  # of the machine

    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))

    torch.manual_seed(1)
    count = int(gib * (1 << 30)) // 4 // BLOCKS
    data = [torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int32, device="cuda") for _ in range(BLOCKS)]
    left, right = torch.rand(1024, 1024, device="cuda"), torch.rand(1024, 1024, device="cuda")
    result = torch.empty_like(left)

    def total() -> int:
        return sum(int(piece.sum(dtype=torch.int64)) for block in data for piece in block.split(PIECE))

    def change() -> None:
        for block in data:
            rows = block[: len(block) // ROW * ROW].view(-1, ROW)
            rows[:: max(1, round(1 / changed))].random_(-(1 << 31), (1 << 31) - 1)

    graph = _captured(lambda: torch.mm(left, right, out=result).add_(1.0))
    expected, product, checked = total(), left @ right + 1.0, time.monotonic()
    step = 0
    while True:
        step += 1
        for _ in range(REPLAYS):
            graph.replay()
        scratch = torch.full((2 << 20 << step % 5,), step, dtype=torch.int32, device="cuda")
        require(int(scratch[-1]) == step, "a new allocation")
        del scratch
        if step % 4 == 0:
            torch.cuda.empty_cache()
        require(torch.allclose(result, product), "the graph")
        if time.monotonic() - checked > CHECK_SECONDS:
            require(total() == expected, "the sum")
            checked = time.monotonic()
        print(f"step {step}", flush=True)
        if wanted:
            wanted.clear()
            change()
            expected = total()
            print("changed", flush=True)


def measure() -> None:
    """Print what work costs."""
    import torch

    def allocate() -> None:
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64 << 20))
        torch.cuda.empty_cache()

    layers = [torch.nn.Linear(4096, 4096) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.rand(512, 4096, device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            model(batch)

    work = {"allocate": allocate, "train": train, "infer": infer}
    print(json.dumps({name: _cost(one, torch.cuda.synchronize) for name, one in work.items()}), flush=True)


def _cost(work: Callable[[], None], wait: Callable[[], None], times: int = 50, rounds: int = 9) -> float:
    costs = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        wait()
        costs.append((time.perf_counter() - began) / times)
    return statistics.median(costs)


def _captured(work: Callable[[], object]) -> Any:
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def require(right: bool, what: str) -> None:
    if not right:
        print(f"wrong: {what}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(float(sys.argv[2]), float(sys.argv[3]))
    else:
        measure()

"""Stands in for a PyTorch program on the pretended driver, in rehearsals: `run GIB CHANGED`, or `hold BYTES`.

`run` keeps GIB of the GPU in blocks, of which it reads one in each step and prints "step N". On SIGUSR1 it fills a
share CHANGED of them again, and prints "changed". A wrong byte ends it with "wrong: …". `hold` only keeps memory.
"""

from __future__ import annotations

import signal
import sys
import time
from itertools import count

from tests.gpu.zoo.figures import say
from tests.gpu.zoo.gpu import MIB, Gpu

BLOCK = 2 * MIB
STEP_SECONDS = 0.01


def run(gib: float, changed: float) -> None:
    """Compute forever; a suspend and a resume must not be seen in the memory."""
    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))
    gpu = Gpu()
    blocks = [gpu.allocate(BLOCK) for _ in range(max(1, int(gib * 1024) * MIB // BLOCK))]
    values = [_fill(gpu, block, number) for number, block in enumerate(blocks)]
    for step in count(1):
        number = step % len(blocks)
        found = gpu.read(blocks[number], BLOCK)
        if found[0] != values[number] or found[BLOCK - 1] != values[number]:
            say(f"wrong: block {number} at step {step}")
            sys.exit(3)
        say(f"step {step}")
        if wanted:
            wanted.clear()
            for place in range(0, len(blocks), max(1, round(1 / changed))):
                values[place] = _fill(gpu, blocks[place], values[place] + 1)
            say("changed")
        time.sleep(STEP_SECONDS)


def _fill(gpu: Gpu, block: int, value: int) -> int:
    value = value % 255 + 1  # zeros are not copied
    gpu.fill(block, value, BLOCK)
    return value


def hold(size: int) -> None:
    """Keep so many bytes of the GPU until the standard input ends."""
    Gpu().allocate(max(BLOCK, size))
    say("held")
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(float(sys.argv[2]), float(sys.argv[3]))
    else:
        hold(int(sys.argv[2]))

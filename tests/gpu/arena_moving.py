"""A program in the arena comes back on the GPU where it was, on another one, and after that there again."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.sequence import suspend
from tests.bench.figures import Figure
from tests.gpu.arena_programs import GIB, START_SECONDS, STEPS, Program, node, resumed


def moving(argv: Sequence[str | Path], gib: float, rounds: int, library: Path, lane: str) -> Iterator[Figure]:
    """Measure it with a payload that begins on the first GPU; nothing where the machine has only one.

    Raises AssertionError where the program does not continue, or is on another GPU than it should be.
    """
    moved: list[float] = []
    stayed: list[float] = []
    with tempfile.TemporaryDirectory() as name, node(gib, Path(name)) as socket:

        async def main() -> None:
            async with cuda_helper(socket, start=False) as helper:
                gpus = [gpu.uuid for gpu in (await helper.info()).gpus]
                if len(gpus) < 2:  # there is nowhere to go
                    return
                for number in range(rounds + 1):
                    program = Program.start(argv, library, Path(name))
                    try:
                        program.wait_for_steps(STEPS, START_SECONDS)
                        await _cycle(helper, program, (), 0, gib)  # after which the arena knows it
                        here = await _cycle(helper, program, (), 0, gib)
                        there = await _cycle(helper, program, exchange(gpus), 1, gib)
                        await _cycle(helper, program, (), 1, gib)
                    finally:
                        program.end()
                    if number:  # the first round makes the helper's contexts
                        stayed.append(here)
                        moved.append(there)

        asyncio.run(main())
    if moved:
        middles = statistics.median(moved), statistics.median(stayed)
        yield Figure(f"arena.moving.{gib:g}GiB", lane, *middles, "s", None, rounds)


def exchange(gpus: Sequence[str]) -> list[GpuPair]:
    """Return the map that lets the first two GPUs change places; the driver wants to be told of all."""
    first, second, *rest = gpus
    return [GpuPair(first, second), GpuPair(second, first), *(GpuPair(uuid, uuid) for uuid in rest)]


async def _cycle(helper: CudaHelper, program: Program, pairs: Sequence[GpuPair], gpu: int, gib: float) -> float:
    """Suspend and resume, see that it computes on `gpu`, and return what both took."""
    pid = program.process.pid
    began = time.monotonic()
    out = await suspend(helper, lambda: [pid], arena=True)
    suspended = time.monotonic() - began
    back = (await resumed(helper, pid, out.taken.bytes, pairs, gpu))[-1].seconds
    program.wait_for_steps(STEPS)
    assert out.taken.bytes, f"the arena has taken nothing: {out.taken.reasons}"
    used = [gpu.used_bytes for gpu in (await helper.info()).gpus]
    assert used[gpu] >= gib * GIB > used[1 - gpu], f"it should be on GPU {gpu}, and they have {used} bytes in use"
    how = f"to GPU {gpu}" if pairs else f"on GPU {gpu}"
    print(f"  {how:9} suspend {suspended:6.3f} s, resume {back:6.3f} s", flush=True)
    return suspended + back

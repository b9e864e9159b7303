"""Two programs, each on a GPU of its own, leave and come back concurrently, as the processes of one container do."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.sequence import resume, suspend
from tests.bench.figures import Figure
from tests.gpu.arena_programs import GIB, START_SECONDS, STEPS, Program, ahead, node

GPUS = 2
Seconds = dict[tuple[str, int], list[float]]  # by verb, and how many programs it was about


def pairing(argv: Sequence[str | Path], gib: float, rounds: int, library: Path, lane: str) -> Iterator[Figure]:
    """Compare both concurrently with one alone, in turns; nothing where the machine has only one GPU.

    Raises AssertionError where a program does not continue, or is not on its GPU.
    """
    seconds: Seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, node(gib, Path(name), GPUS) as socket:

        async def main() -> None:
            async with cuda_helper(socket, start=False) as helper:
                if len((await helper.info()).gpus) < GPUS:
                    return
                programs: list[Program] = []
                try:
                    for gpu in range(GPUS):
                        seen = {"CUDA_VISIBLE_DEVICES": str(gpu)}
                        programs.append(Program.start(argv, library, Path(name), f"on-{gpu}", seen))
                    for program in programs:
                        program.wait_for_steps(STEPS, START_SECONDS)
                    for number in range(rounds + 1):
                        for some in (programs, programs[:1]) if number % 2 else (programs[:1], programs):
                            spent = await _cycle(helper, programs, some, gib)
                            for verb, one in spent.items() if number else ():  # the first round fills the arena
                                seconds[verb, len(some)].append(one)
                finally:
                    for program in programs:
                        program.end()

        asyncio.run(main())
    for verb in dict.fromkeys(verb for verb, _ in seconds):
        both, alone = (statistics.median(seconds[verb, count]) for count in (GPUS, 1))
        yield Figure(f"arena.pairing.{verb}.{gib:g}GiB", lane, both, alone, "s", None, rounds)


async def _cycle(
    helper: CudaHelper, programs: Sequence[Program], some: Sequence[Program], gib: float
) -> dict[str, float]:
    """Suspend `some` of the programs and resume them, see that all compute on their GPUs; return what both took."""
    pids = [program.process.pid for program in some]
    began = time.monotonic()
    out = await suspend(helper, lambda: pids, arena=True)
    left = time.monotonic()
    early = [await ahead(helper, pid, out.taken.moved[pid], gpu) for gpu, pid in enumerate(pids)]
    await resume(helper, pids, ahead=early)
    back = time.monotonic()
    assert not out.taken.reasons, f"not by the arena: {out.taken.reasons}"
    for program in programs:
        program.wait_for_steps(STEPS)
    used = [gpu.used_bytes for gpu in (await helper.info()).gpus[:GPUS]]
    assert all(gib * GIB <= bytes < 2 * gib * GIB for bytes in used), f"one on each, and they have {used} bytes in use"
    spent = {"suspend": left - began, "resume": back - left}
    told = ", ".join(f"{verb} {seconds:6.3f} s" for verb, seconds in spent.items())
    print(f"  {len(some)} of {len(programs)}: {told}", flush=True)
    return spent

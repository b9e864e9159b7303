"""A served transformer is suspended between two requests and in the middle of one, and answers as it did before."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.sequence import suspend
from kybernate_shim.linux import huge_pages
from tests.bench.figures import Figure
from tests.gpu.arena_programs import GIB, START_SECONDS, Program, node, resumed

PAYLOAD = Path(__file__).with_name("serving_payload.py")
QUESTIONS = 3
LOAD_SECONDS = 2 * START_SECONDS
CACHES = 2  # GiB for the prompt's keys and values, their copies, and what generate() makes
Seconds = dict[tuple[str, str, str], list[float]]  # by verb, when, and way


def serving(gib: float, rounds: int, library: Path, lane: str) -> Iterator[Figure]:
    """Measure both ways in turns. Raises AssertionError where an answer is another one, or does not come."""
    seconds: Seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, node(gib + CACHES, Path(name)) as socket:
        program = Program.start([PAYLOAD, str(gib)], library, Path(name))

        async def main() -> None:
            async with cuda_helper(socket, start=False) as helper:
                await _rounds(helper, program, rounds, seconds)

        try:
            program.wait_for_word("ready", 1, LOAD_SECONDS)
            asyncio.run(main())
        finally:
            program.end()
    for verb, when in dict.fromkeys((verb, when) for verb, when, _ in seconds):
        ours, plain = (statistics.median(seconds[verb, when, way]) for way in ("arena", "plain"))
        yield Figure(f"arena.serving.{verb}.{when}", lane, ours, plain, "s", None, rounds)


async def _rounds(helper: CudaHelper, program: Program, rounds: int, seconds: Seconds) -> None:
    for question in [*range(QUESTIONS)] * 2:  # the payload compares: without a suspend, too, they must be the same
        _ask(program, question)
        program.wait_for_steps(1)
    ways = ("arena", "plain")
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            for when in ("between", "during"):
                before = program.step
                if when == "during":
                    begun = program.said("begun")
                    _ask(program, number % QUESTIONS)
                    program.wait_for_word("begun", begun + 1)
                spent = await _cycle(helper, program, way, when)
                if when == "between":
                    _ask(program, number % QUESTIONS)
                program.wait_for_steps(before + 1 - program.step)
                for verb, one in spent.items() if number else ():  # the first round fills the arena
                    seconds[verb, when, way].append(one)


def _ask(program: Program, question: int) -> None:
    program.tell(str(question))


async def _cycle(helper: CudaHelper, program: Program, way: str, when: str) -> dict[str, float]:
    """Suspend, look whether it is frozen, resume, and return what both took."""
    pid, began = program.process.pid, time.monotonic()
    with huge_pages.huge_pages("node"):
        out = await suspend(helper, lambda: [pid], arena=way == "arena")
    spent, step = time.monotonic() - began, program.step
    for reason in out.taken.reasons.values():
        print(f"  not by the arena: {reason}", flush=True)
    assert way == "plain" or out.taken.bytes, "the arena has taken nothing"
    await asyncio.sleep(0.2)
    assert program.step == step, "it answers without its memory"
    back = (await resumed(helper, pid, out.taken.bytes))[-1].seconds
    copied = (out.taken.bytes - out.taken.spared) / GIB
    print(f"  {when:8} {way:6} suspend {spent:6.3f} s, {copied:6.2f} GiB copied, resume {back:6.3f} s", flush=True)
    return {"suspend": spent, "resume": back}

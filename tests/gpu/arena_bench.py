"""Measures suspend and resume through the arena on a real card, in turns with the plain way of the driver.

For each size, one PyTorch program that computes, checks and allocates without a pause is suspended and resumed again
and again, every other time through the arena; what it holds of descriptors and threads must not grow. Then two of them
change places, with the rest of the card filled up so that only one of them fits. Then what allocations and steps cost
with the preload library and without it. It needs root, a driver of 580 or newer, a C
compiler, and a `python3` with torch, cuda-bindings, protobuf and structlog (from build/gpu-kit where that is there); no
containerd.

A JSON line per figure goes to build/bench-gpu.jsonl. Figures named `….limit` compare with what must be reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.cuda import pages
from kybernate_shim.cuda.arena.memory import FOLDER
from kybernate_shim.cuda.client import CudaHelper, cuda_helper, log_path, start_helper
from kybernate_shim.cuda.sequence import Step, resume, suspend
from kybernate_shim.native import PRELOAD, build
from tests.bench.figures import HEADING, Figure, record, row

GIB = 1 << 30
PAYLOAD = Path(__file__).with_name("arena_payload.py")
WAYS = ("arena", "plain")
# What a program of so many GiB may take at most, in seconds; measured on an H200 these hold as they are.
LIMITS = {(16, "swap"): 0.95, (16, "suspend"): 0.70, (16, "resume"): 0.55, (40, "suspend"): 1.20, (40, "resume"): 1.00}
MOST_SWAPPED = 16  # GiB of programs of which the card must hold two for a moment
COST_BAR = 1.01  # of the library, in everything that programs do
START_SECONDS = 120
STEP_SECONDS = 30
STEPS = 5
MARGIN = 6 << 30  # what the ballast leaves of the card: room for the driver's part of a program, not for its memory
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Program:
    """A running payload."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, gib: float, library: Path, folder: Path, name: str = "one") -> Program:
        output = folder / f"{name}.out"
        with output.open("wb") as stream:
            environment = {**os.environ, "LD_PRELOAD": str(library)}
            argv = [sys.executable, str(PAYLOAD), "run", str(gib)]
            process = subprocess.Popen(argv, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        program = cls(process, output)
        program.wait_for_steps(STEPS, START_SECONDS)
        return program

    def wait_for_steps(self, count: int, seconds: float = STEP_SECONDS) -> None:
        """Wait until `count` more steps are done. Raises AssertionError, with what it has said."""
        wanted, until = self._step() + count, time.monotonic() + seconds
        while self._step() < wanted:
            assert self.process.poll() is None, f"it ended: {self.output.read_text()[-2000:]}"
            assert time.monotonic() < until, f"it stands still: {self.output.read_text()[-500:]}"
            time.sleep(0.01)

    def holdings(self) -> tuple[int, int]:
        """Return how many descriptors and threads it has."""
        place = Path(f"/proc/{self.process.pid}")
        return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _step(self) -> int:
        lines = self.output.read_text(errors="replace").split("\n")[:-1]
        return int(lines[-1].split()[1]) if lines and lines[-1].startswith("step ") else 0


@dataclass
class Measured:
    """Seconds by verb and way, and of the last cycle of each, by step."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, verb: str, way: str, seconds: float, steps: Sequence[Step]) -> None:
        self.seconds[verb, way].append(seconds)
        told = ", ".join(f"{step.name} {step.seconds:.3f}" for step in steps)
        moved = sum(step.bytes for step in steps) / GIB
        print(f"  {verb:8} {way:6} {seconds:7.3f} s   {moved:6.2f} GiB by the arena   {told}", flush=True)

    def figures(self, gib: float, lane: str) -> Iterator[Figure]:
        for verb in ("suspend", "resume", "swap"):
            ours, plain = (self.seconds[verb, way] for way in WAYS)
            if ours and plain:
                middles = statistics.median(ours), statistics.median(plain)
                yield Figure(f"arena.{verb}.{gib:g}GiB", lane, *middles, "s", None, len(ours))
            if ours and (limit := LIMITS.get((int(gib), verb))):
                name = f"arena.{verb}.{gib:g}GiB.limit"
                yield Figure(name, lane, statistics.median(ours), limit, "s", 1.0, len(ours))


async def cycles(helper: CudaHelper, program: Program, rounds: int, plain_rounds: int, measured: Measured) -> None:
    """Suspend and resume in turns. Raises AssertionError where the program does not go on, or holds more and more."""
    pid = program.process.pid
    before: tuple[int, int] | None = None
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            if way == "plain" and (number > plain_rounds or not plain_rounds):
                continue
            with pages.huge_pages("node"):
                began = time.monotonic()
                out = await suspend(helper, lambda: [pid], arena=way == "arena")
                spent = time.monotonic() - began
            told = [*out.steps, *(await _resumed(helper, pid))]
            program.wait_for_steps(STEPS)
            if number:  # the first round fills the arena
                measured.note("suspend", way, spent, out.steps)
                measured.note("resume", way, told[-1].seconds, told[len(out.steps) : -1])
            for reason in out.taken.reasons.values():
                print(f"  not by the arena: {reason}", flush=True)
        before = before or (program.holdings() if number else None)  # the first round is also the driver's first
    assert before is not None
    after = program.holdings()
    assert all(now <= then for now, then in zip(after, before, strict=True)), f"it holds {after} after {before}"


async def _resumed(helper: CudaHelper, pid: int) -> list[Step]:
    """Resume; the last step returned is the whole."""
    began = time.monotonic()
    steps = await resume(helper, [pid])
    return [*steps, Step("whole", time.monotonic() - began)]


async def swaps(helper: CudaHelper, programs: tuple[Program, Program], rounds: int, measured: Measured) -> None:
    """Let two programs change places on a card that has no room for both."""
    away = programs[1].process.pid
    needed = (await suspend(helper, lambda: [away], arena=True)).taken.bytes

    async def room() -> None:
        while await _free(helper) < needed:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.005)

    with ballast(await _free(helper) - MARGIN):
        for number in range(rounds + 1):
            out, back = programs if number % 2 == 0 else reversed(programs)
            pid = out.process.pid
            began = time.monotonic()
            coming = asyncio.create_task(resume(helper, [back.process.pid], room=room))
            left = await suspend(helper, lambda: [pid], arena=True)  # noqa: B023  # asked at once
            steps = [*left.steps, *(await coming)]
            spent = time.monotonic() - began
            back.wait_for_steps(STEPS)
            needed = left.taken.bytes
            if number:
                measured.note("swap", "arena", spent, steps)


async def _free(helper: CudaHelper) -> int:
    return (await helper.info()).gpus[0].free_bytes or 0


@contextmanager
def ballast(size: int) -> Iterator[None]:
    """Hold so many bytes of the card."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", BALLAST, str(size)], stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n", "the card cannot be filled up"
        yield
    finally:
        process.kill()
        process.communicate()


def costs(library: Path, rounds: int, lane: str) -> Iterator[Figure]:
    """Compare what work costs with the library and without it, in turns."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        for preload in (str(library), "") if number % 2 else ("", str(library)):
            environment = {**os.environ, "LD_PRELOAD": preload}
            said = subprocess.check_output([sys.executable, PAYLOAD, "time"], env=environment, text=True)
            for name, seconds in json.loads(said.splitlines()[-1]).items():
                found[name]["ours" if preload else "stock"].append(seconds * 1e3)
    for name, sides in found.items():
        ours, stock = statistics.median(sides["ours"]), statistics.median(sides["stock"])
        yield Figure(f"arena.cost.{name}", lane, ours, stock, "ms", COST_BAR, rounds)


@contextmanager
def node(gib: float, folder: Path, programs: int) -> Iterator[Path]:
    """Run a CUDA helper with an arena for so many programs of `gib`; yields its socket."""
    socket = folder / "cuda.sock"
    size = int(gib * 1.1 + 2) * GIB * programs
    pid = start_helper(socket, options=["--arena", str(size), "--arena-folder", str(FOLDER)])
    try:
        while not socket.exists():
            time.sleep(0.02)
        yield socket
    finally:
        os.kill(pid, 15)
        os.waitpid(pid, 0)
        print("".join(f"  {line}\n" for line in log_path(socket).read_text().splitlines() if '"error"' in line), end="")
        subprocess.run(["umount", FOLDER], check=False)


def measure(gib: float, arguments: argparse.Namespace, library: Path) -> list[Figure]:
    """Measure one size."""
    measured = Measured()
    swapping = bool(arguments.swap_rounds) and gib <= MOST_SWAPPED
    with tempfile.TemporaryDirectory() as name, node(gib, Path(name), 1 + swapping) as socket:
        programs = [Program.start(gib, library, Path(name))]

        async def main() -> None:
            async with cuda_helper(socket, start=False) as helper:
                await cycles(helper, programs[0], arguments.rounds, arguments.plain_rounds, measured)
                if swapping:
                    programs.append(Program.start(gib, library, Path(name), "two"))
                    await swaps(helper, (programs[0], programs[1]), arguments.swap_rounds, measured)

        try:
            asyncio.run(main())
        finally:
            for program in programs:
                program.end()
    return list(measured.figures(gib, arguments.lane))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", default="16,40", help="sizes, separated by commas (16,40)")
    parser.add_argument("--rounds", type=int, default=5, help="through the arena (5)")
    parser.add_argument("--plain-rounds", type=int, default=3, help="the driver's way, of these; 0: left out (3)")
    parser.add_argument("--swap-rounds", type=int, default=5, help="of two programs of up to 16 GiB; 0: left out (5)")
    parser.add_argument("--cost-rounds", type=int, default=3, help="with the library and without it; 0: left out (3)")
    parser.add_argument("--lane", default="gpu", help="what to call the machine in the figures (gpu)")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu.jsonl"))
    arguments = parser.parse_args(argv)
    library = build(PRELOAD, Path(tempfile.mkdtemp()))
    found: list[Figure] = []
    for gib in map(float, arguments.gib.split(",")):
        print(f"{gib:g} GiB", flush=True)
        found += measure(gib, arguments, library)
        record(found, arguments.output)
    if arguments.cost_rounds:
        found += costs(library, arguments.cost_rounds, arguments.lane)
        record(found, arguments.output)
    print("\n".join([HEADING, *map(row, found)]), flush=True)
    return 0 if all(figure.good for figure in found) else 1

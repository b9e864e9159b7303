"""Measures suspend and resume through the arena on a real GPU, in turns with the plain way of the driver.

For each size, one PyTorch program that computes, checks and allocates without a pause is suspended and resumed again
and again, every other time through the arena, after it has changed a share of its memory (--changed); what it holds of
descriptors and threads must not grow. Then two of them change places, with the rest of the GPU filled up so that only
one of them fits. Then, where there are two GPUs, one goes from the first to the second, and two programs leave and
come back concurrently, each on a GPU. Then a transformer is served, and suspended between requests and during them.
Then what allocations and steps cost with the preload library and without it. It needs root, a driver of 580 or newer,
a C compiler, and a `python3` with torch, transformers, cuda-bindings, msgspec and protobuf (from
build/gpu-kit where that is there); no containerd.

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

from kybernate_shim.arena.extents import total
from kybernate_shim.arena.memory import FOLDER, Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.checkpoint.gpu.room import FIRST_BYTES, STALLED_SECONDS
from kybernate_shim.gpu.helper_answers import RoomComing
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.sequence import Ahead, resume, suspend
from kybernate_shim.linux import huge_pages
from kybernate_shim.native import PRELOAD, build
from kybernate_shim.steps import Step
from tests.bench.figures import HEADING, Figure, record, row
from tests.gpu.against.compare import compare
from tests.gpu.arena_moving import moving
from tests.gpu.arena_pairing import pairing
from tests.gpu.arena_programs import GIB, START_SECONDS, STEPS, Program, node, resumed
from tests.gpu.arena_serving import serving
from tests.gpu.machine import CHECKOUT

PAYLOAD = Path(__file__).with_name("arena_payload.py")
WAYS = ("arena", "plain")
# What a program of so many GiB may take at most, in seconds, on the GPU on which that was measured.
LIMITS_GPU = "H200"
LIMITS = {
    (16, "swap", 1.0): 0.90,
    (16, "suspend", 1.0): 0.50,
    (16, "resume", 1.0): 0.55,
    (40, "suspend", 1.0): 1.00,
    (40, "resume", 1.0): 0.95,
    (40, "suspend", 0.05): 0.55,
}
ENDURANCE_GIB = 4
MOVING_GIB = 16
SETTLING = 5  # cycles after which everything has been used once
MOST_SWAPPED = 16  # GiB of programs of which the GPU must hold two for a moment
SCRATCH_BAR = 1.1  # what a program allocates and frees all the while, of the memory that it has
COST_BAR = 1.01  # of the library, in everything that programs do
DRIVERS = 1 << 30  # what the driver's part of a program takes at most
MARGIN = 6 << 30  # what the ballast leaves of the GPU: room for the driver's part of a program, not for its memory
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def computing(gib: float, changed: float, library: Path, folder: Path, name: str = "one") -> Program:
    """Start the payload, and wait until it computes. Raises AssertionError."""
    program = Program.start(payload(gib, changed), library, folder, name)
    program.wait_for_steps(STEPS, START_SECONDS)
    return program


def payload(gib: float, changed: float) -> list[str | Path]:
    return [PAYLOAD, "run", str(gib), str(changed)]


def _holdings(pid: int) -> tuple[int, int]:
    place = Path(f"/proc/{pid}")
    return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))


@dataclass
class Measured:
    """Seconds by verb and way, and of the last cycle of each, by step. `gpu` is the name of the GPU."""

    gpu: str = ""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, verb: str, way: str, seconds: float, steps: Sequence[Step]) -> None:
        self.seconds[verb, way].append(seconds)
        told = ", ".join(f"{step.name} {step.seconds:.3f}" for step in steps)
        moved, copied = (sum(values) / GIB for values in _bytes_of(steps))
        by_arena = f"{moved:6.2f} GiB by the arena, {copied:6.2f} copied"
        print(f"  {verb:8} {way:6} {seconds:7.3f} s   {by_arena}   {told}", flush=True)

    def figures(self, gib: float, changed: float, lane: str) -> Iterator[Figure]:
        for verb in ("suspend", "resume", "swap"):
            ours, plain = (self.seconds[verb, way] for way in WAYS)
            if ours and plain:
                middles = statistics.median(ours), statistics.median(plain)
                yield Figure(f"arena.{verb}.{gib:g}GiB.{changed:.0%}", lane, *middles, "s", None, len(ours))
            if ours and LIMITS_GPU in self.gpu and (limit := LIMITS.get((int(gib), verb, changed))):
                name = f"arena.{verb}.{gib:g}GiB.{changed:.0%}.limit"
                yield Figure(name, lane, statistics.median(ours), limit, "s", 1.0, len(ours))


def _bytes_of(steps: Sequence[Step]) -> tuple[list[int], list[int]]:
    return [step.bytes for step in steps], [step.bytes - step.spared for step in steps]


async def cycles(helper: CudaHelper, program: Program, rounds: int, plain_rounds: int, measured: Measured) -> None:
    """Suspend and resume in turns. Raises AssertionError where the program stops, or holds more and more."""
    pid = program.process.pid
    before: tuple[int, int] | None = None
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            if way == "plain" and (number > plain_rounds or not plain_rounds):
                continue
            program.change()
            with huge_pages.huge_pages("node"):
                began = time.monotonic()
                out = await suspend(helper, lambda: [pid], arena=way == "arena")
                spent = time.monotonic() - began
            told = [*out.steps, *(await resumed(helper, pid, out.taken.bytes))]
            program.wait_for_steps(STEPS)
            if number:  # the first round fills the arena
                measured.note("suspend", way, spent, out.steps)
                measured.note("resume", way, told[-1].seconds, told[len(out.steps) : -1])
            for reason in out.taken.reasons.values():
                print(f"  not by the arena: {reason}", flush=True)
        before = before or (
            _holdings(program.process.pid) if number else None
        )  # the first round is also the driver's first
    assert before is not None
    after = _holdings(program.process.pid)
    assert all(now <= then for now, then in zip(after, before, strict=True)), f"it holds {after} after {before}"


async def swaps(helper: CudaHelper, programs: tuple[Program, Program], rounds: int, measured: Measured) -> None:
    """Let two programs change places on a GPU that has no room for both."""
    away = programs[1].process.pid
    needed = (await suspend(helper, lambda: [away], arena=True)).taken.bytes

    gpu = (await helper.info()).gpus[0].uuid

    async def room() -> None:
        while await _free(helper) < min(needed, FIRST_BYTES):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.005)

    with ballast(await _free(helper) - MARGIN):
        for number in range(rounds + 1):
            out, back = programs if number % 2 == 0 else reversed(programs)
            pid = out.process.pid
            out.change()
            began = time.monotonic()
            coming = asyncio.create_task(
                resume(
                    helper,
                    [back.process.pid],
                    room=room,
                    coming=RoomComing(gpu, STALLED_SECONDS),
                    ahead=[Ahead(back.process.pid, gpu, DRIVERS, room_comes=True)],
                )
            )
            left = await suspend(helper, lambda: [pid], arena=True)  # noqa: B023  # asked immediately
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
    """Hold so many bytes of the GPU."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", BALLAST, str(size)], stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n", "the GPU cannot be filled up"
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


def endurance(gib: float, changed: float, arguments: argparse.Namespace, library: Path) -> Iterator[Figure]:
    """Suspend and resume a computing program so often that whatever is not given back shows. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as name, node(gib, Path(name), 1) as socket:
        program = computing(gib, changed, library, Path(name))
        spent: list[float] = []

        async def main() -> tuple[dict[str, int], dict[str, int]]:
            async with cuda_helper(socket, start=False) as helper:
                for number in range(arguments.cycles + SETTLING):
                    if number == SETTLING:
                        before = await _held(helper, program, socket)
                    program.change()
                    began = time.monotonic()
                    out = await suspend(helper, lambda: [program.process.pid], arena=True)
                    await resumed(helper, program.process.pid, out.taken.bytes)
                    spent.append(time.monotonic() - began)
                    program.wait_for_steps(1)
                return before, await _held(helper, program, socket)

        try:
            before, after = asyncio.run(main())
        finally:
            program.end()
    middles = statistics.median(spent[-10:]), statistics.median(spent[SETTLING : SETTLING + 10])
    yield Figure("arena.cycles.last-against-first", arguments.lane, *middles, "s", 1.1, arguments.cycles)
    for what, count in after.items():
        bar = SCRATCH_BAR if what in ("vram", "arena", "resident") else 1.0
        used = max(count, 1), max(before[what], 1)  # nothing is kept of what cannot be hashed
        yield Figure(f"arena.cycles.{what}", arguments.lane, *used, "", bar, arguments.cycles)


async def _held(helper: CudaHelper, program: Program, socket: Path) -> dict[str, int]:
    """Return what the program, the helper and its workers hold: of the GPU, the arena and memory in MiB, and others."""
    (gpu, *_) = (await helper.info()).gpus
    (theirs,) = (pid for pid in _pids() if str(socket) in _arguments(pid))
    workers = [pid for pid in _pids() if _parent(pid) == theirs]
    counted = [_holdings(pid) for pid in (program.process.pid, theirs, *workers)]
    return {
        "vram": sum(gpu.holdings.get(pid, 0) for pid in (program.process.pid, theirs, *workers)) >> 20,
        "arena": total(Memory(0, FOLDER).copies(ArenaOwner.of(program.process.pid)).extents) >> 20,
        "descriptors": sum(descriptors for descriptors, _ in counted),
        "threads": sum(threads for _, threads in counted),
        "resident": sum(_resident(pid) for pid in (program.process.pid, theirs, *workers)) >> 20,
    }


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def measure(gib: float, changed: float, arguments: argparse.Namespace, library: Path) -> list[Figure]:
    """Measure one size, of which a share changes between two suspends."""
    measured = Measured()
    swapping = bool(arguments.swap_rounds) and gib <= MOST_SWAPPED
    with tempfile.TemporaryDirectory() as name, node(gib, Path(name), 1 + swapping) as socket:
        programs = [computing(gib, changed, library, Path(name))]

        async def main() -> None:
            async with cuda_helper(socket, start=False) as helper:
                measured.gpu = (await helper.info()).gpus[0].name
                await cycles(helper, programs[0], arguments.rounds, arguments.plain_rounds, measured)
                if swapping:
                    programs.append(computing(gib, changed, library, Path(name), "two"))
                    await swaps(helper, (programs[0], programs[1]), arguments.swap_rounds, measured)

        try:
            asyncio.run(main())
        finally:
            for program in programs:
                program.end()
    return list(measured.figures(gib, changed, arguments.lane))


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison with another checkout, with --gib, --rounds and --swap-rounds")
    group.add_argument(
        "--against", type=Path, metavar="DIRECTORY", help="the other checkout: both are measured in turns"
    )
    group.add_argument("--out", type=Path, default=CHECKOUT / "build/against", help="its results (build/against)")
    group.add_argument("--pack", type=Path, metavar="FILE.tar.gz", help="pack the results, at most 16 MiB")
    group.add_argument("--minutes", type=float, default=7.0, help="after which nothing begins (7)")
    group.add_argument("--container-gib", type=float, default=16, help="payload of a whole container (16)")
    group.add_argument("--container-rounds", type=int, default=3, help="its restores; 0: left out (3)")
    group.add_argument("--first-rounds", type=int, default=1, help="of first suspends for each size; 0: left out (1)")
    group.add_argument("--kit", type=Path, default=CHECKOUT / "build/gpu-kit", help="for the container")
    group.add_argument("--root", default="", help="the container's nodes, removed afterwards")
    group.add_argument("--pretended", default="", metavar="LIBRARIES", help="rehearse on the pretended driver in there")
    parser.set_defaults(most_swapped=MOST_SWAPPED)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", default="16,40", help="sizes, separated by commas (16,40)")
    parser.add_argument("--changed", help="shares of it that change between suspends (0.05,1; with --against 1)")
    parser.add_argument("--cycles", type=int, default=200, help="of the endurance run; 0: left out (200)")
    parser.add_argument("--cycles-gib", type=float, default=ENDURANCE_GIB, help="payload of the endurance run (4)")
    parser.add_argument("--rounds", type=int, default=5, help="through the arena (5)")
    parser.add_argument("--plain-rounds", type=int, default=3, help="the driver's way, of these; 0: left out (3)")
    parser.add_argument("--swap-rounds", type=int, default=5, help="of two programs of up to 16 GiB; 0: left out (5)")
    parser.add_argument("--move-rounds", type=int, default=3, help="from a GPU to another; 0: left out (3)")
    parser.add_argument("--pair-rounds", type=int, default=3, help="of two, each on a GPU; 0: left out (3)")
    parser.add_argument("--serve-gib", type=float, default=14, help="weights of the transformer that is served (14)")
    parser.add_argument("--serve-rounds", type=int, default=3, help="between and during its requests; 0: left out (3)")
    parser.add_argument("--cost-rounds", type=int, default=3, help="with the library and without it; 0: left out (3)")
    parser.add_argument("--lane", default="gpu", help="what to call the machine in the figures (gpu)")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu.jsonl"))
    _add_comparison(parser)
    arguments = parser.parse_args(argv)
    arguments.changed = arguments.changed or ("1" if arguments.against else "0.05,1")
    if arguments.against:
        return compare(arguments)
    library = build(PRELOAD, Path(tempfile.mkdtemp()))
    found: list[Figure] = []
    sizes, shares = (list(map(float, text.split(","))) for text in (arguments.gib, arguments.changed))
    for gib, changed in ((gib, changed) for gib in sizes if gib for changed in shares):
        print(f"{gib:g} GiB, {changed:.0%} of it changed", flush=True)
        found += measure(gib, changed, arguments, library)
        record(found, arguments.output)
    if arguments.cycles:
        print(f"{arguments.cycles} cycles", flush=True)
        found += endurance(arguments.cycles_gib, shares[0], arguments, library)
        record(found, arguments.output)
    if arguments.move_rounds:
        print("from GPU to GPU", flush=True)
        found += moving(payload(MOVING_GIB, shares[0]), MOVING_GIB, arguments.move_rounds, library, arguments.lane)
        record(found, arguments.output)
    if arguments.pair_rounds:
        print("two programs, each on a GPU", flush=True)
        found += pairing(payload(MOVING_GIB, shares[0]), MOVING_GIB, arguments.pair_rounds, library, arguments.lane)
        record(found, arguments.output)
    if arguments.serve_rounds:
        print("a served transformer", flush=True)
        found += serving(arguments.serve_gib, arguments.serve_rounds, library, arguments.lane)
        record(found, arguments.output)
    if arguments.cost_rounds:
        found += costs(library, arguments.cost_rounds, arguments.lane)
        record(found, arguments.output)
    print("\n".join([HEADING, *map(row, found)]), flush=True)
    return 0 if all(figure.good for figure in found) else 1

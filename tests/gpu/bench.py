"""Measures the data path of VRAM bytes on a real GPU: the plain way and the fast one in turns, in one run.

For each size, with huge pages as the machine has them, as we set them, and with the image's memory made ready before: a
container is checkpointed into memory and restored from there, again and again; every other time its bytes take the
other way. A container that was created with one way restores an image of the other, and is then checkpointed by its
own, so that both are measured on both verbs in every two cycles. Then suspend and resume in place, against the bare
calls of the driver. At last two containers in turns, one whose memory goes through the arena and one that takes the
fast way, each checkpointed and restored.

A JSON line per figure goes to build/bench-gpu.jsonl, as `make bench` writes them; the steps of each go next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kybernate_shim.arena.memory import FOLDER
from tests.bench.figures import HEADING, record, row
from tests.gpu import from_disk
from tests.gpu.bench_cycle import NAME, THP, Cycle, Rounds, of_process, tmpfs
from tests.gpu.bench_figures import (
    ARENA_WAYS,
    GIB,
    PAGES,
    WAYS,
    Measured,
    arena_figures,
    disk_figures,
    figures,
    memory_figures,
    shares,
)
from tests.gpu.host_memory import touch
from tests.gpu.machine import CHECKOUT, Machine, end_helper, filesystem_for_overlays, remove
from tests.gpu.report import prepared
from tests.gpu.scenarios import ARENA, Bench

SIZES = "2,16,60"


def measure(bench: Bench, size: int, rounds: Rounds, *, kinds: Sequence[str] = tuple(PAGES)) -> Measured:
    """Measure one size, `bench.mib` MiB of payload, with each of these kinds of pages."""
    measured = Measured()
    with tmpfs(bench.images / "memory", 2 * size + GIB + (of_process(size) if "pool" in kinds else 0)) as memory:
        for pages in kinds:
            cycle = Cycle(bench, memory, measured)
            cycle.log.unlink(missing_ok=True)
            cycle.settings(WAYS[0], pages)
            cycle.start(command=bench.payload("one"))
            try:
                _cycles(cycle, pages, rounds)
                if pages != "pool":  # which is for images alone
                    cycle.in_place(pages, rounds)
            finally:
                cycle.remove()
    return measured


def _cycles(cycle: Cycle, pages: str, rounds: Rounds) -> None:
    """Each round: a checkpoint the fast way, its restore, one the plain way, its restore; the first does not count."""
    for _, kept in rounds:
        for way, other in (WAYS, WAYS[::-1]):
            image = cycle.memory / way
            cycle.checkpoint(way, pages, image, kept=kept)
            cycle.settings(other, pages)  # how the container that is now restored will be checkpointed
            cycle.restore(way, pages, image, kept=kept)


def measure_arena(bench: Bench, size: int, rounds: Rounds, *, ways: Sequence[str] = ARENA_WAYS) -> Measured:
    """Measure checkpoint and restore through the arena, in turns with a container that goes without it."""
    measured = Measured()
    end_helper()  # it has been started without an arena
    with tmpfs(bench.images / "memory", 2 * size + GIB) as memory:
        cycles = {way: Cycle(bench, memory, measured, f"{NAME}-{way}", ARENA if way == "arena" else ()) for way in ways}
        next(iter(cycles.values())).settings("fast", "thp", arena=int(size * 1.1) + 2 * GIB)
        running = []
        try:
            for cycle in cycles.values():
                cycle.log.unlink(missing_ok=True)
                cycle.start(command=bench.payload("one"))
                running.append(cycle)
            for _, kept in rounds:
                for way, cycle in cycles.items():
                    image = memory / way
                    cycle.checkpoint(way, "thp", image, kept=kept)
                    cycle.restore(way, "thp", image, kept=kept)
        finally:
            for cycle in running:
                cycle.remove()
            end_helper()
            subprocess.run(["umount", "--lazy", FOLDER], check=False)  # a worker gives its memory back for a while
    return measured


def measure_disk(bench: Bench, size: int, rounds: Rounds, *, disk: Path | None) -> Measured:
    """Measure the restore from the machine's disk, through the arena, in turns with `cat` of the same bytes.

    Each round ends with a checkpoint into memory and the restore from there.
    """
    measured, disk = Measured(), disk or bench.images / "disk"
    end_helper()
    disk.mkdir(exist_ok=True)
    with tmpfs(bench.images / "memory", 2 * size + GIB) as memory:
        cycle = Cycle(bench, memory, measured, f"{NAME}-disk", ARENA)
        cycle.settings("fast", "thp", arena=int(size * 1.1) + 2 * GIB)
        cycle.log.unlink(missing_ok=True)

        def restore(image: Path) -> float:
            began = time.time()
            seconds = cycle.start("--annotation", f"kybernate.io/restore-from={image}")
            measured.note(("restore from disk", "arena", "thp"), seconds, cycle.steps_of_restore(began, seconds), 0)
            return seconds

        try:
            cycle.start(command=bench.payload("one"))
            for number, kept in rounds:
                cycle.checkpoint("arena", "thp", memory / "image", kept=False)
                restored, read = from_disk.in_turns(memory / "image", disk, number, restore)
                subprocess.run(["rm", "-r", memory / "image"], check=True)
                if kept:
                    measured.note(("from disk", "arena", "thp"), restored, {}, 0)
                    measured.note(("from disk", "cat", "thp"), read, {}, 0)
                cycle.checkpoint("arena", "thp", memory / "image", kept=kept)
                cycle.restore("arena", "thp", memory / "image", kept=kept)
        finally:
            cycle.remove()
            end_helper()
            subprocess.run(["umount", "--lazy", FOLDER], check=False)
    return measured


def main(argv: Sequence[str]) -> int:
    """Return 1 when a figure misses its bar."""
    arguments = _arguments(argv)
    root = arguments.root or filesystem_for_overlays()
    machine = Machine.start(root, arguments.kit)
    good, rows = True, ["| verb | GiB | way | huge pages | step | seconds | share |", "|---|---|---|---|---|---|---|"]
    try:
        lane = arguments.lane or _gpu(machine)
        for gib in map(float, arguments.gib.split(",")):
            size = int(gib * GIB)
            print(f"{gib:g} GiB on {lane}, huge pages {THP.read_text().strip()}", flush=True)
            if gib >= 1 and not touch(2 * size + 4 * GIB):
                print(f"  left out: the machine has not {2 * gib + 4:g} GiB of memory", flush=True)
                continue
            bench = prepared(machine, replace_mib(arguments, size >> 20))
            for wanted, measuring, comparing in (
                (arguments.rounds, partial(measure, kinds=arguments.pages.split(",")), figures),
                (arguments.arena_rounds, measure_arena, arena_figures),
                (arguments.memory_rounds, partial(measure_arena, ways=["arena"]), memory_figures),
                (arguments.disk_rounds, partial(measure_disk, disk=arguments.disk), disk_figures),
            ):
                if not wanted:
                    continue
                measured = measuring(bench, size, Rounds(wanted, arguments.warm_up))
                found = list(comparing(measured, gib, lane))
                record(found, arguments.output)
                print("\n".join([HEADING, *map(row, found), ""]), flush=True)
                good = good and all(figure.good for figure in found)
                rows += shares(measured, gib)
                arguments.output.with_suffix(".md").write_text("\n".join([*_header(lane), *rows, ""]))
    except BaseException:
        print(machine.log(), file=sys.stderr)
        raise
    finally:
        machine.stop()
        remove(root)
    return 0 if good else 1


def replace_mib(arguments: argparse.Namespace, mib: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), "mib": mib})


def _gpu(machine: Machine) -> str:
    (first, *_) = json.loads(machine("kybernate", "cuda", "gpus", "--json"))
    return str(first["name"])


def _header(lane: str) -> list[str]:
    return [
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {lane}, {os.cpu_count()} cores, kernel"
        f" {os.uname().release}, huge pages as they are: {THP.read_text().strip()}",
        "",
    ]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kit", type=Path, default=CHECKOUT / "build/gpu-kit", help="made by python -m tests.gpu.kit")
    parser.add_argument("--root", type=Path, help="the node's directory, removed afterwards")
    parser.add_argument("--gib", default=SIZES, help=f"sizes of the payload ({SIZES})")
    parser.add_argument("--pages", default=",".join(PAGES), help=f"kinds of pages for these ({','.join(PAGES)})")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after those that do not count; 0: left out (3)"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count (1)")
    parser.add_argument("--arena-rounds", type=int, default=3, help="the same for the arena; 0: left out (3)")
    parser.add_argument("--memory-rounds", type=int, default=0, help="the same for the arena alone (0)")
    parser.add_argument("--disk-rounds", type=int, default=0, help="the same for restores from the disk (0)")
    parser.add_argument("--disk", type=Path, help="a directory on it (one of the node's)")
    parser.add_argument("--lane", help="what the figures are kept under (the GPU's name)")
    parser.add_argument("--output", type=Path, default=CHECKOUT / "build/bench-gpu.jsonl")
    parser.add_argument("--pretended", type=Path, metavar="LIBRARIES", help="rehearse on the pretended driver in there")
    return parser.parse_args(argv)

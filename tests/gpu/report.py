"""Runs the scenarios one after the other and writes RESULTS.md: GPU, driver, versions, seconds per step, date."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu import scenarios, seats, waking
from tests.gpu.host_memory import GIB, total, touch_what_is_there
from tests.gpu.machine import CHECKOUT, DRIVER, Machine, filesystem_for_overlays, gpu_nodes, remove
from tests.gpu.nvidia import Toolkit
from tests.gpu.pack import pack
from tests.gpu.scenarios import ARENA, PAYLOAD, Bench, await_true
from tests.gpu.zoo.cycles import run_cycles
from tests.gpu.zoo.keeper import run_zoo
from tests.gpu.zoo.table import WAYS, UnknownProgram, chosen

BY_NAME = (
    scenarios.switches,
    waking.wakes_on_use,
    waking.vram_is_limited,
    seats.seats_of_two_gpus,
    seats.suspends_leave_nothing,
    seats.notebook_wakes,
    seats.seats_rotate,
)
SHARED_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
PRETENDED = "computes.py"
SETTINGS = '{more}[gpu]\narena = "{gib}GiB"\n'
ZOO_ARENA = 16  # GiB at most, where --arena says nothing
ARENA_SHARE = 4  # which part of the machine's memory it is then


def main(argv: Sequence[str]) -> int:
    """Return 0 when every scenario has passed."""
    arguments = _arguments(argv)
    root = arguments.root or filesystem_for_overlays()
    machine = Machine.start(root, arguments.kit, arguments.runtime)
    failures: dict[str, str] = {}
    try:
        if arguments.zoo is not None or arguments.cycles:
            return _zoo(machine, arguments)
        bench = prepared(machine, arguments, arguments.arena)
        if arguments.touch:
            touch_what_is_there(arguments.arena * GIB)
        gpus = first_look(bench)
        wanted = [
            *(scenarios.BY_NVIDIA if bench.toolkit else ()),
            *scenarios.ONE_GPU,
            *(scenarios.TWO_GPUS if len(gpus) > 1 and not arguments.pretended else ()),
            *(one for one in BY_NAME if one.__name__ in (arguments.only or ())),
        ]
        arguments.out.mkdir(parents=True, exist_ok=True)
        done: list[str] = []
        for scenario in wanted:
            name = scenario.__name__
            if arguments.only and name not in arguments.only:
                continue
            done.append(name)
            if failure := _attempt(scenario, bench):
                failures[name] = failure
            # After each, so that a run that is cut short leaves what it has found out.
            (arguments.out / "RESULTS.md").write_text(_report(bench, gpus, done, failures))
    finally:
        if failures:
            print(machine.log(), file=sys.stderr)
        machine.stop()
        if machine.runtime == "nvidia":
            Toolkit(root / "nvidia").remove()
        remove(root)
        if arguments.pack:
            print("\n".join(pack(arguments.out, arguments.pack)), flush=True)
    return 1 if failures else 0


def first_look(bench: Bench) -> list[dict[str, Any]]:
    """Return the GPUs; the helper, which is started by that, has a minute where the machine is slow."""
    await_true(lambda: bool(bench.kybernate("cuda", "gpus", "--json", status=None)), "the helper answers", seconds=60)
    found: list[dict[str, Any]] = json.loads(bench.kybernate("cuda", "gpus", "--json"))
    return found


def _zoo(machine: Machine, arguments: argparse.Namespace) -> int:
    """Run programs of the zoo, or cycles of them: with the arena and without it, by their annotation."""
    until = time.monotonic() + arguments.minutes * 60
    bench = prepared(machine, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = f'log_file = "{arguments.out.absolute() / "shim.log"}"\n'
    gib = arguments.arena or max(1, min(ZOO_ARENA, total() // GIB // ARENA_SHARE))
    machine.configure(SETTINGS.format(gib=gib, more=log))
    if arguments.pretended:
        tests = CHECKOUT / "tests"  # alone: in the lab, another mount lies below the checkout
        bench.flags += ["--mount", f"type=bind,src={tests},dst={tests},options=rbind:ro"]
    else:
        touch_what_is_there(2 * gib * GIB)  # or the first programs would seem slow
    gpus = json.loads(bench.kybernate("cuda", "gpus", "--json"))
    how = {"out": arguments.out, "jobs": arguments.jobs, "pretended": bool(arguments.pretended), "until": until}
    name = f"{len(gpus)} of {gpus[0]['name']}, {gpus[0]['total_bytes'] >> 30} GiB each, {total() >> 30} GiB of memory"
    if arguments.cycles:
        return run_cycles(bench, arguments.zoo or "", count=arguments.cycles, seed=arguments.seed, machine=name, **how)
    ways = arguments.ways.split(",")
    return run_zoo(bench, arguments.zoo, ways=ways, machine=name, gpus=len(gpus), **how)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kit", type=Path, default=CHECKOUT / "build/gpu-kit", help="made by python -m tests.gpu.kit")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build/gpu", help="where RESULTS.md goes")
    parser.add_argument("--pack", type=Path, metavar="FILE.tar.gz", help="pack what --out has then, at most 16 MiB")
    parser.add_argument("--root", type=Path, help="the node's directory, removed afterwards")
    parser.add_argument("--mib", type=int, default=2048, help="payload of each process (2048)")
    parser.add_argument("--arena", type=int, default=0, metavar="GIB", help="through an arena of so many GiB (0: none)")
    parser.add_argument(
        "--touch", action="store_true", help="touch as much memory before, which is slow the first time"
    )
    parser.add_argument(
        "--zoo", nargs="?", const="all", metavar="NAMES", help="programs of the zoo in place of scenarios: all, or a,b"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of the zoo ({','.join(WAYS)})")
    parser.add_argument("--jobs", type=int, default=4, help="programs of the zoo, or cycles, at once (4)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing of the zoo begins (9)")
    parser.add_argument("--cycles", type=int, default=0, metavar="N", help="suspend and resume the zoo so often")
    parser.add_argument("--seed", type=int, default=1, help="of the cycles (1)")
    parser.add_argument(
        "--runtime",
        choices=("runc", "nvidia"),
        default="runc",
        help="what gives containers their GPUs (runc: flags do)",
    )
    parser.add_argument("--only", action="append", metavar="SCENARIO", help="leave the others out; may be repeated")
    parser.add_argument("--pretended", type=Path, metavar="LIBRARIES", help="rehearse on the pretended driver in there")
    arguments = parser.parse_args(argv)
    try:
        chosen(arguments.zoo or "", gpus=8)
    except UnknownProgram as error:  # before minutes are spent on a machine
        parser.error(str(error))
    if unknown := set(arguments.ways.split(",")) - set(WAYS):
        parser.error(f"--ways {', '.join(unknown)}: not among {', '.join(WAYS)}")
    return arguments


def prepared(machine: Machine, arguments: argparse.Namespace, arena: int = 0) -> Bench:
    """Return what scenarios work with, by `mib` and `pretended` of the arguments, and an arena of so many GiB."""
    images = machine.root / "images"
    images.mkdir(exist_ok=True)
    libraries = [str(path) for path in (DRIVER / "lib64", DRIVER / "lib") if path.is_dir()]
    shared = [f"/dev/{name}" for name in SHARED_DEVICES if machine.runtime == "runc" and Path("/dev", name).exists()]
    flags = [word for path in (gpu_nodes()[0], *shared) for word in ("--device", path)]
    toolkit = Toolkit.install(machine) if machine.runtime == "nvidia" else None
    if arena:
        machine.configure(SETTINGS.format(gib=arena, more=""))
        flags += ARENA
    if arguments.pretended:
        libraries = [str(arguments.pretended)]
        flags += ["--mount", "type=bind,src=/run/fake-cuda,dst=/run/fake-cuda,options=rbind:rw"]
        program = [sys.executable, str(arguments.pretended / PRETENDED)]
    else:
        flags += ["--mount", f"type=bind,src={CHECKOUT},dst={CHECKOUT},options=rbind:ro"]
        program = [sys.executable, str(PAYLOAD)]
    if toolkit is None:
        flags += ["--env", f"LD_LIBRARY_PATH={':'.join(libraries)}"]
    flags += ["--env", "HOME=/tmp"]

    def payload(what: str, mib: int = 0, gpus: int = 1) -> list[str]:
        mib = mib or arguments.mib
        if not arguments.pretended:  # a container has no other GPUs than those that it is for
            return [*program, what, str(mib)]
        if what in ("one", "several"):
            return [*program, str(min(mib, 2)), "20", ",".join(map(str, range(gpus)))]
        both = " ".join(f'({" ".join(program)} 2 20 | while read l; do echo "{n}: $l"; done) &' for n in (0, 1))
        return ["sh", "-c", f"{both} wait"]

    out = getattr(arguments, "out", None) or images
    return Bench(machine, images, payload, flags, arguments.mib, bool(arena), toolkit, out, arguments.pretended)


def _attempt(scenario: Callable[[Bench], None], bench: Bench) -> str:
    begin = time.monotonic()
    print(f"begins {scenario.__name__}", flush=True)
    try:
        scenario(bench)
    except Exception as error:  # noqa: BLE001  # the others are still of interest, and the report names this one
        print(f"FAILED {scenario.__name__} after {time.monotonic() - begin:.1f} s", flush=True)
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    print(f"passed {scenario.__name__} in {time.monotonic() - begin:.1f} s", flush=True)
    return ""


def _report(bench: Bench, gpus: Sequence[dict[str, object]], names: Sequence[str], failures: dict[str, str]) -> str:
    doctor = json.loads(bench.kybernate("doctor", "--json", status=None))
    facts = [f"- {one['subject']}: {one['found']}".replace("\n", " / ") for one in doctor]
    rows = [
        f"| {name} | {step} | {seconds:.3f} | {moved / 2**20:.0f} | {_rate(seconds, moved)} |"
        for name, step, seconds, moved in bench.rows
    ]
    passed = [f"- {name}: {'FAILED: ' + failures[name] if name in failures else 'passed'}" for name in names]
    return "\n".join(
        [
            "# A run on real GPUs",
            "",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {len(gpus)} GPUs, {os.cpu_count()} cores, {bench.mib} MiB each"
            f"{', through the arena' if bench.arena else ''}"
            f"{', by the runtime of NVIDIA' if bench.toolkit else ''}.",
            "",
            *facts,
            "",
            "## Scenarios",
            "",
            *passed,
            "",
            "## Steps",
            "",
            "| scenario | step | seconds | MiB | GB/s |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _rate(seconds: float, moved: int) -> str:
    return f"{moved / seconds / 1e9:.2f}" if moved and seconds else ""

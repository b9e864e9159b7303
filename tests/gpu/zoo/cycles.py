"""Suspends and resumes programs of the zoo hundreds of times, in random order, some in parallel; nothing may leak."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kybernate_shim.arena.memory import FOLDER, Memory
from tests.gpu.scenarios import GO_ON_SECONDS, Bench, Container, await_true, container
from tests.gpu.zoo.held import KINDS, Grown, by_processes, by_programs, compared, least
from tests.gpu.zoo.passage import brief, command, flags_of
from tests.gpu.zoo.table import CYCLED, Entry, chosen

SETTLING = 3  # cycles of each program after which everything has been used once
PROGRESS = 20  # cycles between two lines
PAUSE_SECONDS = 0.2  # the longest between two cycles of a thread, and between a suspend and its resume
CLEANING_SECONDS = 90  # of the time there is, for what is looked at in the end
PLAIN_EVERY = 4  # every fourth program goes without the arena


@dataclass
class Run:
    """What the threads share: how many cycles are to be made, and the first failure."""

    bench: Bench
    count: int
    until: float
    done: int = 0
    failure: str = ""
    seconds: list[float] = field(default_factory=list)
    memory: list[dict[str, dict[str, int]]] = field(default_factory=list)  # of each program, before and after
    _gate: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> bool:
        """Take one of the cycles that are left."""
        with self._gate:
            if self.failure or self.done >= self.count or time.monotonic() > self.until:
                return False
            self.done += 1
            if self.done % PROGRESS == 0:
                print(f"  {self.done} of {self.count} cycles", flush=True)
            return True

    def fail(self, why: str) -> None:
        with self._gate:
            self.failure = self.failure or why


def way_of(place: int) -> str:
    return "plain" if place % PLAIN_EVERY == PLAIN_EVERY - 1 else "arena"


def run_cycles(
    bench: Bench,
    names: str,
    *,
    count: int,
    seed: int,
    jobs: int,
    out: Path,
    pretended: bool,
    until: float,
    machine: str,
) -> int:
    """Make so many cycles, or as many as there is time for; return 1 where something was wrong or leaked."""
    entries = [entry for entry in chosen(names, pretended=pretended, default=CYCLED)[0] if not entry.refused]
    out.mkdir(parents=True, exist_ok=True)
    run = Run(bench, count, until - CLEANING_SECONDS)
    idle = bench.in_use()
    began, grown = time.monotonic(), list[Grown]()
    with ExitStack() as stack:
        try:
            running = _start(bench, entries, stack, jobs)
            print(f"{len(running)} programs compute after {time.monotonic() - began:.0f} s", flush=True)
            ids = [one.id for one in running]
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda one: _settle(run, one, seed), running))
            print(f"each went through {SETTLING} cycles after {time.monotonic() - began:.0f} s", flush=True)
            before = least(lambda: _held(bench, ids))
            run.memory.append(by_programs(ids))
            run.seconds.clear()
            _make(run, running, seed, jobs)
            for one in running:
                one.computes_on(_lines(entries, one))
            grown = compared(before, least(lambda: _held(bench, ids)))
            run.memory.append(by_programs(ids))
        except Exception as error:  # noqa: BLE001  # what has been found out until now is told all the same
            run.fail(brief(error))
    if not run.failure:
        try:
            bench.await_idle(idle)
        except AssertionError as error:
            run.fail(f"VRAM is in use after all programs have ended: {brief(error)}")
    return _tell(run, grown, entries, seed, out, machine)


def _start(bench: Bench, entries: Sequence[Entry], stack: ExitStack, jobs: int) -> list[Container]:
    """Start all, some concurrently. Those that cannot run on this machine are left out."""

    def start(place: int, entry: Entry) -> Container:
        way = way_of(place)
        name = f"cycles-{entry.name}-{way}"
        (bench.images / f"{name}.log").unlink(missing_ok=True)
        running = container(bench, name, *command(entry, bench.mib), programs=entry.lines, flags=flags_of(entry, way))
        one = running.__enter__()
        with gate:
            stack.push(running.__exit__)
        return one

    gate = threading.Lock()
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(start, range(len(entries)), entries))


def _settle(run: Run, one: Container, seed: int) -> None:
    """Let a program go through what makes it hold more for the first time."""
    for _ in range(SETTLING):
        _cycle(run, one, random.Random(seed))


def _make(run: Run, running: Sequence[Container], seed: int, jobs: int) -> None:
    """Let each of `jobs` threads take cycles for containers of its own."""

    def work(number: int) -> None:
        numbers, mine = random.Random(seed * 1000 + number), running[number::jobs]
        while mine and run.next():
            one = numbers.choice(mine)
            try:
                time.sleep(numbers.uniform(0, PAUSE_SECONDS))
                _cycle(run, one, numbers)
            except Exception as error:  # noqa: BLE001  # it ends the run, which reports it
                run.fail(f"{one.id}: {brief(error)}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _cycle(run: Run, one: Container, numbers: random.Random) -> None:
    began = time.monotonic()
    run.bench.kybernate("suspend", one.id)
    suspended = time.monotonic() - began
    if numbers.random() < 0.5:
        time.sleep(numbers.uniform(0, PAUSE_SECONDS))
    before, began = one.steps(), time.monotonic()
    run.bench.kybernate("resume", one.id)
    run.seconds.append(suspended + time.monotonic() - began)
    await_true(
        lambda: all(new > old for new, old in zip(one.steps(), before, strict=True)),
        f"{one.id} goes on from {before}",
        seconds=GO_ON_SECONDS,
    )


def _lines(entries: Sequence[Entry], one: Container) -> int:
    return next(entry.lines for entry in entries if one.id.startswith(f"cycles-{entry.name}-"))


def _held(bench: Bench, ids: Sequence[str]) -> dict[str, int]:
    """Return what is held now: of the first GPU, of the arena, and by processes."""
    arena = Memory(0, FOLDER)
    taken = (arena.size - arena.free()) >> 20 if arena.size else 0
    vram = sum(bench.in_use().values()) >> 20
    return {"vram MiB": vram, "arena MiB": taken, **by_processes(ids)}


def _tell(run: Run, grown: Sequence[Grown], entries: Sequence[Entry], seed: int, out: Path, machine: str) -> int:
    leaks = [one for one in grown if not one.good]
    median = sorted(run.seconds)[len(run.seconds) // 2] if run.seconds else 0.0
    rows = [
        f"| {one.name} | {one.before} | {one.after} | {one.most}{'' if one.good else ' **leak**'} |" for one in grown
    ]
    told = [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine}, {os.cpu_count()} cores.",
        f"{run.done} cycles of {run.count}, seed {seed}, over {', '.join(entry.name for entry in entries)};"
        f" a suspend and its resume {median:.2f} s (median).",
        "",
        *(["| held | before | after | at most |", "|---|---|---|---|", *rows, ""] if grown else []),
        *(_memory_table(*run.memory) if len(run.memory) == 2 else []),
        f"FAILED: {run.failure}" if run.failure else f"Leaks: {', '.join(one.name for one in leaks) or 'none'}.",
    ]
    if run.done < run.count and not run.failure:
        told.append(f"The time was over. The rest: --cycles {run.count - run.done} --seed {seed + 1}")
    print("\n".join(told), flush=True)
    (out / "cycles.md").write_text("\n".join([*told, ""]))
    line = {"cycles": run.done, "of": run.count, "seed": seed, "median_s": round(median, 3), "failure": run.failure}
    line["machine"] = machine
    line["memory"] = run.memory
    line["held"] = {one.name: [one.before, one.after, one.most] for one in grown}
    with (out / "cycles.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    return int(bool(run.failure or leaks or run.done < run.count))


def _memory_table(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what each program has resident, so that it can be seen whose memory grows."""
    kinds = list(KINDS.values())
    rows = [
        f"| {name} | " + " | ".join(f"{before[name][kind]} → {after[name][kind]}" for kind in kinds) + " |"
        for name in before
    ]
    return [f"| resident MiB | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}", *rows, ""]

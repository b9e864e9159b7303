"""Runs the zoo: several programs concurrently, each within its deadline, and writes down what is known after each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu.scenarios import Bench
from tests.gpu.zoo.passage import FAILED, NOT_REACHED, Outcome, Passage, all_passages, brief, pass_through
from tests.gpu.zoo.results import lines, text
from tests.gpu.zoo.table import Entry, chosen

SPARE_SECONDS = 45  # of the time there is, in which no program is begun any more
END_OF_LOG = 6000  # characters of a program's output that are kept where it passed; all of it where it did not


@dataclass
class Zoo:
    """What is run, and where its results go: `zoo.md`, `zoo.jsonl` and `zoo.log`, the output of all programs."""

    bench: Bench
    out: Path
    machine: str
    left_out: dict[str, str]
    passages: list[Passage] = field(default_factory=list)
    _gate: threading.Lock = field(default_factory=threading.Lock)

    def note(self, passage: Passage) -> None:
        with self._gate:
            self.passages.append(passage)
            print(f"{passage.result:12} {passage.entry.name} ({passage.way}), {passage.seconds:.1f} s", flush=True)
            if passage.why:
                print(f"             {passage.why}", flush=True)
            with (self.out / "zoo.jsonl").open("a") as stream:
                stream.write(lines(passage))
            with (self.out / "zoo.log").open("a") as stream:
                stream.write(_section(passage))
            (self.out / "zoo.md").write_text(self.report())

    def report(self) -> str:
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        heading = f"# The zoo\n\n{when}, {self.machine}, {os.cpu_count()} cores."
        return text(heading, self.passages, self.left_out)


def run_zoo(
    bench: Bench,
    names: str,
    *,
    ways: Sequence[str],
    out: Path,
    machine: str,
    gpus: int,
    pretended: bool,
    jobs: int,
    until: float,
) -> int:
    """Run the programs that `names` lists, `jobs` concurrently; return 1 where one failed or was not reached.

    None is begun shortly before `until`, a time of time.monotonic().
    """
    entries, left_out = chosen(names, gpus=gpus, pretended=pretended)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("zoo.jsonl", "zoo.log"):
        (out / name).unlink(missing_ok=True)
    zoo = Zoo(bench, out, machine, left_out)
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(_one, bench, entry, way, until): (entry, way) for entry, way in all_passages(entries, ways)
        }
        for future in as_completed(running):
            zoo.note(_passage(future, *running[future]))
    print(zoo.report(), flush=True)
    return int(any(passage.result in (FAILED, NOT_REACHED) for passage in zoo.passages))


def _one(bench: Bench, entry: Entry, way: str, until: float) -> Passage:
    if time.monotonic() > until - SPARE_SECONDS:
        return _unreached(entry, way, f"the time was over; run it again: --zoo {entry.name}")
    return pass_through(bench, entry, way, bench.images)


def _passage(future: Future[Passage], entry: Entry, way: str) -> Passage:
    error = future.exception()
    if error is None:
        return future.result()
    return Passage(entry, way, [Outcome(step, FAILED, why=brief(error)) for step in entry.steps])


def _unreached(entry: Entry, way: str, why: str) -> Passage:
    return Passage(entry, way, [Outcome(step, NOT_REACHED, why=why) for step in entry.steps])


def _section(passage: Passage) -> str:
    log = passage.log if passage.result == FAILED else passage.log[-END_OF_LOG:]
    heading = f"==== {passage.entry.name} ({passage.way}): {passage.result} {passage.why}"
    return f"{heading}\n{_without_steps(log)}\n"


def _without_steps(log: str) -> str:
    """Return a log with the first and the last of the lines that tell no more than that a step was made."""
    told = log.split("\n")
    last = max((number for number, line in enumerate(told) if "step " in line), default=-1)
    kept = []
    for number, line in enumerate(told):
        if "step " not in line or number in (0, last) or "step 1 " in line:
            kept.append(line)
    return "\n".join(kept)

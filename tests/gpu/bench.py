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
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from kybernate_shim.arena.memory import FOLDER
from tests.bench.figures import HEADING, Figure, record, row
from tests.gpu.host_memory import touch, used
from tests.gpu.machine import CHECKOUT, IMAGE, Machine, filesystem_for_overlays, mounts, remove
from tests.gpu.report import prepared
from tests.gpu.scenarios import ARENA, Bench

GIB = 1 << 30
SIZES = "2,16,60"
WAYS = ("fast", "plain")
ARENA_WAYS = ("fast", "arena")
PAGES = {  # `gpu.huge_pages`
    "as-is": {"fast": "off", "plain": "off"},
    "thp": {"fast": "process", "plain": "node"},
    "pool": {"fast": "process", "plain": "node"},  # and the image's memory is made before
}
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Of ours to theirs, at 16 GiB and more: what must be reached.
BARS = {"checkpoint": 0.70, "restore": 0.42, "suspend": 1.03, "resume": 1.05}
ARENA_BAR = 1.0  # of the arena's to the fast way's
BAR_GIB = 16
START_SECONDS = 300
POLL_SECONDS = 0.02
NAME = "bench"
SETTINGS = """runtime = "runc"
verify = false
log_file = "{log}"
[gpu]
data_path = "{way}"
huge_pages = "{pages}"
"""
POOL_SETTING = 'image_pool = "{pool}"\nimage_pool_files = ["{mib}MiB"]\n'
ARENA_SETTING = 'arena = "{mib}MiB"\n'


@dataclass(frozen=True)
class Rounds:
    """So many that are measured, after so many that do not count; each is its number, and whether it counts."""

    measured: int
    warm_up: int

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        return ((number, number >= self.warm_up) for number in range(self.warm_up + self.measured))


@dataclass
class Measured:
    """What the rounds of one size have cost: seconds by verb, way and kind of pages, and their steps."""

    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[tuple[str, str, str], list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    peaks: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, key: tuple[str, str, str], seconds: float, steps: dict[str, float], peak: int) -> None:
        self.seconds[key].append(seconds)
        self.steps[key].append(steps)
        self.peaks[key].append(peak / GIB)
        told = " ".join(f"{name} {cost:.2f}" for name, cost in steps.items() if cost >= 0.005)
        print(f"  {' '.join(key):24} {seconds:8.3f} s   peak {peak / GIB:6.2f} GiB   {told}", flush=True)


@dataclass
class Cycle:
    """One container after the other on one node, each restored from the image of the one before."""

    bench: Bench
    memory: Path
    measured: Measured
    name: str = NAME
    flags: Sequence[str] = ()
    number: int = 0

    @property
    def log(self) -> Path:
        return self.bench.images / f"{self.name}.log"

    @property
    def shim_log(self) -> Path:
        return self.bench.images / "shim.log"

    def settings(self, way: str, pages: str, *, arena: int = 0) -> None:
        text = SETTINGS.format(log=self.shim_log, way=way, pages=PAGES[pages][way])
        text += ARENA_SETTING.format(mib=arena >> 20) if arena else ""
        if pages == "pool" and way == "fast":
            text += POOL_SETTING.format(pool=self.memory / "pool", mib=_of_process(self.bench.mib << 20) >> 20)
        Path("/etc/kybernate/shim.toml").write_text(text)

    def start(self, *flags: str, command: Sequence[str] = ("/never/run",)) -> float:
        """Run a container until it computes, and return the seconds."""
        self.number += 1
        before = self.log.read_text() if self.log.exists() else ""
        argv = ["ctr", "run", "-d", "--runtime", "io.containerd.kybernate.v1", "--log-uri", f"file://{self.log}"]
        begin = time.monotonic()
        self.bench.machine(
            *argv, *mounts(), *self.bench.flags, *self.flags, *flags, IMAGE, self.id, *command, seconds=START_SECONDS
        )
        _await(lambda: _computes(self.log, len(before)), START_SECONDS)
        return time.monotonic() - begin

    @property
    def id(self) -> str:
        return f"{self.name}-{self.number}"

    def remove(self) -> None:
        machine = self.bench.machine
        machine("ctr", "task", "kill", "-s", "SIGKILL", "-a", self.id, status=None)
        _await(self._gone, 60)
        machine("ctr", "container", "rm", self.id, status=None)

    def _gone(self) -> bool:
        self.bench.machine("ctr", "task", "rm", "-f", self.id, status=None)
        return self.id not in self.bench.machine("ctr", "task", "ls")

    def checkpoint(self, way: str, pages: str, image: Path, *, kept: bool = True) -> None:
        """Checkpoint the container that runs, which ends it."""
        if pages == "pool" and way == "fast":
            self.bench.kybernate("pool", "--fill")
        with Peak() as peak:
            answer = json.loads(
                self.bench.kybernate("checkpoint", self.id, str(image), "--no-rootfs", "--exit", "--json")
            )
        self.remove()
        manifest = json.loads((image / "kybernate-manifest.json").read_text())
        assert manifest["data_path"]["name"] == ("fast" if way == "arena" else way), manifest["data_path"]
        assert bool(manifest.get("arena")) == (way == "arena"), "the arena"
        if kept:
            steps = {step["name"]: step["seconds"] for step in answer["steps"]}
            self.measured.note(("checkpoint", way, pages), answer["seconds"], steps, peak.bytes)

    def restore(self, way: str, pages: str, image: Path, *, kept: bool = True) -> None:
        """Restore an image that was made `way`, and remove it."""
        began = time.time()
        with Peak() as peak:
            seconds = self.start("--annotation", f"kybernate.io/restore-from={image}")
        subprocess.run(["rm", "-r", image], check=True)
        if kept:
            self.measured.note(("restore", way, pages), seconds, self._steps_of_restore(began, seconds), peak.bytes)

    def in_place(self, pages: str, rounds: Rounds) -> None:
        """Suspend and resume, by ours and by the driver's bare calls, in turns; the first of each does not count."""
        for number, kept in rounds:
            for who in ("bare", "ours") if number % 2 else ("ours", "bare"):
                for verb in ("suspend", "resume"):
                    with Peak() as peak:
                        steps = self._by_driver(verb, pages) if who == "bare" else self._by_us(verb)
                    if kept:
                        self.measured.note((verb, who, pages), sum(steps.values()), steps, peak.bytes)
        _computes_on(self.log)

    def _by_us(self, verb: str) -> dict[str, float]:
        answer = json.loads(self.bench.kybernate(verb, self.id, "--json"))
        return {step["name"]: step["seconds"] for step in answer["steps"]}

    def _by_driver(self, verb: str, pages: str) -> dict[str, float]:
        row = next(line for line in self.bench.machine("ctr", "task", "ls").splitlines() if line.startswith(self.id))
        with thp("always" if pages == "thp" else None):
            answer = json.loads(self.bench.kybernate("cuda", verb, "--pid", row.split()[1], "--json"))
        return {step["name"]: step["seconds"] for step in answer["steps"]}

    def _steps_of_restore(self, began: float, seconds: float) -> dict[str, float]:
        """Return what the daemon reports of its steps, and what came before, between and after them."""
        lines = [json.loads(line) for line in self.shim_log.read_text().splitlines()]
        events = {line["event"]: line for line in lines if line.get("task") == self.id}
        created, restored = (
            datetime.fromisoformat(events[name]["time"]).timestamp() - began
            for name in ("task.created", "task.restored")
        )
        told = dict(events["task.restored"]["step_seconds"])
        between = restored - created - sum(told.values())
        return {"until it is created": created, **told, "between": between, "until it computes": seconds - restored}


def _of_process(size: int) -> int:
    """Return about what a process has in VRAM whose payload is `size` bytes, in whole huge pages."""
    return (int(size * 1.03) + 3 * GIB // 4) >> 21 << 21


class Peak:
    """Samples the machine's memory in use; `bytes` is the most above what it was at first."""

    def __enter__(self) -> Peak:
        self.bytes, self._first = 0, used()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.bytes = max(self.bytes, used() - self._first)


def _computes(log: Path, since: int) -> bool:
    text = log.read_text()[since:] if log.exists() else ""
    assert "wrong" not in text, text[-2000:]
    return "step " in text


def _computes_on(log: Path) -> None:
    since = len(log.read_text())
    _await(lambda: _computes(log, since), 60)


def _await(look: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, f"not after {seconds:g} s"
        time.sleep(POLL_SECONDS)


@contextmanager
def thp(word: str | None) -> Iterator[None]:
    """Set the node's switch for huge pages, as we would, for a while."""
    if word is None:
        yield
        return
    before = re.findall(r"\[(\w+)\]", THP.read_text())[0]
    THP.write_text(word)
    try:
        yield
    finally:
        THP.write_text(before)


@contextmanager
def tmpfs(directory: Path, size: int) -> Iterator[Path]:
    """Keep images in memory, in huge pages: small ones cost a third more to write."""
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},huge=within_size", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def measure(bench: Bench, size: int, rounds: Rounds, *, kinds: Sequence[str] = tuple(PAGES)) -> Measured:
    """Measure one size, `bench.mib` MiB of payload, with each of these kinds of pages."""
    measured = Measured()
    with tmpfs(bench.images / "memory", 2 * size + GIB + (_of_process(size) if "pool" in kinds else 0)) as memory:
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


def measure_arena(bench: Bench, size: int, rounds: Rounds) -> Measured:
    """Measure checkpoint and restore through the arena, in turns with a container that goes without it."""
    measured = Measured()
    _end_helper()  # it has been started without an arena
    with tmpfs(bench.images / "memory", 2 * size + GIB) as memory:
        cycles = {
            way: Cycle(bench, memory, measured, f"{NAME}-{way}", ARENA if way == "arena" else ()) for way in ARENA_WAYS
        }
        cycles["fast"].settings("fast", "thp", arena=int(size * 1.1) + 2 * GIB)
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
            _end_helper()
            subprocess.run(["umount", "--lazy", FOLDER], check=False)  # a worker gives its memory back for a while
    return measured


def _end_helper() -> None:
    """End the node's CUDA helper, which keeps the settings that it was started with."""
    for helper in _helpers():
        os.kill(helper, signal.SIGTERM)
    _await(lambda: not _helpers(), 30)


def _helpers() -> list[int]:
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_helper(path)]


def _is_helper(path: Path) -> bool:
    """Whether it is the helper of this node: another may live in another root, as the lab's do."""
    try:
        here = (path.parent / "ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
        return here and b"kybernate_shim.cuda_helper.helper" in path.read_bytes()
    except OSError:  # it has ended
        return False


def arena_figures(measured: Measured, gib: float, lane: str) -> Iterator[Figure]:
    """Return the comparisons of the arena with the fast way."""
    bar = ARENA_BAR if gib >= BAR_GIB else None
    for verb in ("checkpoint", "restore"):
        ours, fast = (measured.seconds[verb, way, "thp"] for way in reversed(ARENA_WAYS))
        yield Figure(f"gpu-arena-{verb}.{gib:g}GiB", lane, _middle(ours), _middle(fast), "s", bar, len(ours))


def figures(measured: Measured, gib: float, lane: str) -> list[Figure]:
    """Return the comparisons: fast to plain, ours to the driver's bare calls, and what each needs of memory."""
    found = []
    for verb in ("checkpoint", "restore", "suspend", "resume"):
        ours, theirs = ("fast", "plain") if verb in ("checkpoint", "restore") else ("ours", "bare")
        for pages in [kind for kind in PAGES if (verb, ours, kind) in measured.seconds]:
            costs, stock = measured.seconds[verb, ours, pages], measured.seconds[verb, theirs, pages]
            name = f"gpu-{verb}.{gib:g}GiB.{pages}"
            # In place, only with our pages is there anything to compare.
            bar = BARS[verb] if gib >= BAR_GIB and (pages == "thp" or ours == "fast") else None
            found.append(Figure(name, lane, _middle(costs), _middle(stock), "s", bar, len(costs)))
            if ours == "fast":
                peaks, others = measured.peaks[verb, ours, pages], measured.peaks[verb, theirs, pages]
                found.append(Figure(f"{name}.peak", lane, _middle(peaks), _middle(others), "GiB", None, len(peaks)))
    return found


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def shares(measured: Measured, gib: float) -> list[str]:
    """Return the rows of a table with the median seconds of each step, and its share of the whole."""
    rows = []
    for (verb, way, pages), each in measured.steps.items():
        whole = _middle(measured.seconds[verb, way, pages])
        for step in dict.fromkeys(name for one in each for name in one):
            cost = _middle([one.get(step, 0.0) for one in each])
            rows.append(f"| {verb} | {gib:g} | {way} | {pages} | {step} | {cost:.3f} | {cost / whole:.0%} |")
        rows.append(f"| {verb} | {gib:g} | {way} | {pages} | **whole** | {whole:.3f} | |")
    return rows


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
    parser.add_argument("--lane", help="what the figures are kept under (the GPU's name)")
    parser.add_argument("--output", type=Path, default=CHECKOUT / "build/bench-gpu.jsonl")
    parser.add_argument("--pretended", type=Path, metavar="LIBRARIES", help="rehearse on the pretended driver in there")
    return parser.parse_args(argv)

"""What the rounds of tests/gpu/bench have cost, and the figures and tables that this makes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.bench.figures import Figure

GIB = 1 << 30
WAYS = ("fast", "plain")
ARENA_WAYS = ("fast", "arena")
PAGES = {  # `gpu.huge_pages`
    "as-is": {"fast": "off", "plain": "off"},
    "thp": {"fast": "process", "plain": "node"},
    "pool": {"fast": "process", "plain": "node"},  # and the image's memory is made before
}
# Of ours to theirs, at 16 GiB and more: what must be reached.
BARS = {"checkpoint": 0.70, "restore": 0.42, "suspend": 1.03, "resume": 1.05}
ARENA_BAR = 1.0  # of the arena's to the fast way's
DISK_BAR = 1.1  # of a restore from disk to `cat`
BAR_GIB = 16
MEMORY_LIMITS = {16.0: 1.5}  # seconds of a restore from memory until it computes, by GiB of the payload


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


def arena_figures(measured: Measured, gib: float, lane: str) -> Iterator[Figure]:
    """Return the comparisons of the arena with the fast way."""
    bar = ARENA_BAR if gib >= BAR_GIB else None
    for verb in ("checkpoint", "restore"):
        ours, fast = (measured.seconds[verb, way, "thp"] for way in reversed(ARENA_WAYS))
        yield Figure(f"gpu-arena-{verb}.{gib:g}GiB", lane, middle(ours), middle(fast), "s", bar, len(ours))


def memory_figures(measured: Measured, gib: float, lane: str) -> Iterator[Figure]:
    """Return what a restore from memory through the arena takes against its limit."""
    ours = measured.seconds["restore", "arena", "thp"]
    limit, bar = MEMORY_LIMITS.get(gib, 0.0), 1.0
    if limit:
        yield Figure(f"gpu-restore-from-memory.{gib:g}GiB.limit", lane, middle(ours), limit, "s", bar, len(ours))


def disk_figures(measured: Measured, gib: float, lane: str) -> Iterator[Figure]:
    """Return the comparison of a restore from disk with `cat`."""
    ours, read = (measured.seconds["from disk", way, "thp"] for way in ("arena", "cat"))
    yield Figure(f"gpu-restore-from-disk.{gib:g}GiB", lane, middle(ours), middle(read), "s", DISK_BAR, len(ours))


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
            found.append(Figure(name, lane, middle(costs), middle(stock), "s", bar, len(costs)))
            if ours == "fast":
                peaks, others = measured.peaks[verb, ours, pages], measured.peaks[verb, theirs, pages]
                found.append(Figure(f"{name}.peak", lane, middle(peaks), middle(others), "GiB", None, len(peaks)))
    return found


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def shares(measured: Measured, gib: float) -> list[str]:
    """Return the rows of a table with the median seconds of each step, and its share of the whole."""
    rows = []
    for (verb, way, pages), each in measured.steps.items():
        whole = middle(measured.seconds[verb, way, pages])
        for step in dict.fromkeys(name for one in each for name in one):
            cost = middle([one.get(step, 0.0) for one in each])
            rows.append(f"| {verb} | {gib:g} | {way} | {pages} | {step} | {cost:.3f} | {cost / whole:.0%} |")
        rows.append(f"| {verb} | {gib:g} | {way} | {pages} | **whole** | {whole:.3f} | |")
    return rows

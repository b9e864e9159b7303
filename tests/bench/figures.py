"""Compares two ways of doing the same work: alternating, medians, one verdict.

What else the machine does falls on both alike, because they take turns, and the one that goes first changes with every
round. A figure is a ratio for the same reason: seconds of one machine say nothing of another. It is the median of the
ratios of two neighbouring rounds each, because one machine is not as fast in one minute as in the next, and of two,
because to go first may cost something: checkpoints of 2 GiB took 5 % more, and of an odd number of rounds, whose ratios
lie in two heaps then, the median is in the larger heap. How much such a median is worth is shown next to it: between
which ratios the true one lies, in 95 of 100 runs. Where the bar is among them, and they are far apart because the
machine has much else to do, three times as many rounds are made; it is looked once, as more looks would find what
they wait for.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from pathlib import Path

RESULTS = Path("build/bench.jsonl")
DOUBT = 0.05  # how often an interval may miss the true median
WIDTH = 0.08  # of an interval that needs no more rounds


@dataclass(frozen=True)
class Figure:
    """A comparison. `ours` and `stock` are medians of `n`; `bar` is the highest ratio that is good, None for none.

    `of_rounds` is the median of the ratios of two rounds each, None where there are no rounds; `between` is the
    interval in which it is known, None where the rounds are too few or none.
    """

    name: str
    lane: str
    ours: float
    stock: float
    unit: str
    bar: float | None
    n: int
    of_rounds: float | None = None
    between: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.stock if self.of_rounds is None else self.of_rounds

    @property
    def good(self) -> bool:
        return self.bar is None or self.ratio <= self.bar


@dataclass(frozen=True)
class Pair:
    """What is compared: two callables that do the work once and return what it cost, in `unit`.

    `within` is set where one cost is itself the median of so many processes; it is then measured once.
    """

    name: str
    ours: Callable[[], float]
    stock: Callable[[], float]
    bar: float | None = 1.0
    unit: str = "s"
    within: int | None = None


def compare(pair: Pair, *, lane: str, rounds: int, most: int = 0) -> Figure:
    """Measure both sides `rounds` times, made even, after one unmeasured round in which caches fill.

    With `most`, so many times, if the bar is in the interval by then, and that is wide.
    """
    if pair.within:
        return Figure(pair.name, lane, pair.ours(), pair.stock(), pair.unit, pair.bar, pair.within)
    ours: list[float] = []
    stock: list[float] = []
    ratios: list[float] = []  # of two rounds each: one side went first in one of them
    pair.stock()
    pair.ours()
    while len(ours) < rounds:
        ours.append(pair.ours())
        stock += [pair.stock(), pair.stock()]
        ours.append(pair.ours())
        ratios.append(sum(ours[-2:]) / sum(stock[-2:]))
        if len(ours) >= rounds and _unclear(interval(ratios), pair.bar):
            rounds = max(rounds, most)
    middles = (statistics.median(values) for values in (ours, stock))
    ratio = statistics.median(ratios)
    return Figure(pair.name, lane, *middles, pair.unit, pair.bar, len(ours), ratio, interval(ratios))


def _unclear(between: tuple[float, float] | None, bar: float | None) -> bool:
    if between is None or bar is None:
        return bar is not None
    low, high = between
    return low <= bar <= high and high / low > 1 + WIDTH


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return between which two of `values` their true median lies, whatever its distribution; None for fewer than six.

    It is the sign test's: from the k-th smallest to the k-th greatest value. A value is as likely above the true median
    as a coin shows heads, and fewer than k heads among so many coins are rare enough.
    """
    count = len(values)
    at_most = accumulate(comb(count, heads) for heads in range(count))
    k = sum(1 for ways in at_most if ways / 2**count <= DOUBT / 2)
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


HEADING = f"{'figure':34} {'lane':7} {'ours':>9} {'stock':>9} {'':4} {'ratio':>6} {'between':>9} {'bar':>5} {'n':>3}"


def row(figure: Figure) -> str:
    """Return the figure's line of the table."""
    bar = "" if figure.bar is None else f"{figure.bar:.2f}"
    between = "" if figure.between is None else "{:.2f}-{:.2f}".format(*figure.between)
    return (
        f"{figure.name:34} {figure.lane:7} {figure.ours:9.3f} {figure.stock:9.3f} {figure.unit:4} "
        f"{figure.ratio:6.2f} {between:>9} {bar:>5} {figure.n:3}{'' if figure.good else '  MISSED'}"
    )


def record(figures: Sequence[Figure], path: Path = RESULTS) -> None:
    """Write one JSON line a figure into `path`, in place of the lines that an earlier run left for the same ones."""
    measured = {(figure.name, figure.lane) for figure in figures}
    kept = [line for line in _lines(path) if (line.get("name"), line.get("lane")) not in measured]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*kept, *map(_line, figures))))


def _lines(path: Path) -> Iterable[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _line(figure: Figure) -> dict[str, object]:
    return {
        "name": figure.name,
        "lane": figure.lane,
        "ours": round(figure.ours, 4),
        "stock": round(figure.stock, 4),
        "unit": figure.unit,
        "ratio": round(figure.ratio, 4),
        "between": figure.between and [round(ratio, 4) for ratio in figure.between],
        "bar": figure.bar,
        "n": figure.n,
    }

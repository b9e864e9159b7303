"""Traces of requests: lines of `seconds,seat,work_seconds`, and synthetic ones from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

DAY: Final = 86400.0
MOST: Final = 10_000_000  # requests of a trace


@dataclass(frozen=True, order=True)
class Arrival:
    """A request: when it comes, in seconds, for which seat, and how long a GPU works for it."""

    at: float
    seat: str
    work: float


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of a file, in order. Raises ValueError."""
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            at, seat, work = text.split(",")
            one = Arrival(float(at), seat.strip(), float(work))
        except ValueError as error:
            raise ValueError(f"line {number} is not `seconds,seat,work_seconds`") from error
        if not (one.seat and 0 <= one.at < 1e12 and 0 < one.work < 1e9):
            raise ValueError(f"line {number} has a value out of range")
        if number > MOST:
            raise ValueError(f"it has more than {MOST} lines")
        found.append(one)
    return sorted(found)


def poisson(seats: int, rate: float, work: float, seconds: float, seed: int = 1) -> Iterator[Arrival]:
    """Yield requests at random times, `rate` in a second over all seats, each of the same work."""
    source, at = random.Random(seed), 0.0
    while (at := at + source.expovariate(rate)) < seconds:
        yield Arrival(at, f"s{source.randrange(seats)}", work)


def day(seats: int = 10_000, requests: int = 80_000, seed: int = 1) -> Iterator[Arrival]:
    """Yield a day: few seats have most of the requests (Zipf), more come by day than at night, works differ."""
    source = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.4 for rank in range(seats)]
    names = source.choices(range(seats), weights, k=requests)
    found = []
    for seat in names:
        while True:
            at = source.uniform(0, DAY)
            if source.random() < 0.6 - 0.4 * math.cos(2 * math.pi * at / DAY):
                break
        found.append(Arrival(at, f"s{seat}", min(3600.0, source.lognormvariate(4.5, 1.0))))
    yield from sorted(found)


SYNTHETIC: Final[Mapping[str, Callable[[], Iterator[Arrival]]]] = {
    "day": day,
    "poisson": lambda: poisson(8, 0.2, 2.0, 4 * 3600.0),
}

"""Traces that are made up: each shows one habit of workloads. The same name gives the same trace."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, tzinfo
from itertools import accumulate
from typing import Final

from kybernate.store.simulation.traces import DAY, Access

GIB: Final = 1 << 30
SIZES: Final = (1, 2, 4, 8, 17, 40)  # GiB: of small models, and of such that fill a GPU
START: Final = (2026, 1, 5)  # a Monday


def synthetic(name: str, zone: tzinfo) -> list[Access]:
    """Return a trace in the order of time. Raises KeyError for an unknown name."""
    made = MAKERS[name](random.Random(name), datetime(*START, tzinfo=zone))
    return sorted(made, key=lambda one: (one.time, one.workload))


def _zipf(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield uses of 200 workloads for a week, a few of which are used most of the time (exponent 0.9)."""
    pick = _popular(rng, 200, 0.9)
    yield from (_use(start.timestamp() + time, pick()) for time in _poisson(rng, 7 * DAY, 100.0))


def _diurnal(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield uses whose number follows the day: one half of the workloads in the morning, the other in the evening."""
    morning, evening = _popular(rng, 60, 0.7), _popular(rng, 60, 0.7)
    for time in _poisson(rng, 14 * DAY, 120.0):
        phase = math.sin(2 * math.pi * (time % DAY) / DAY)
        if rng.random() < abs(phase):
            yield _use(
                start.timestamp() + time, f"{'morning' if phase > 0 else 'evening'}-{(morning, evening)[phase < 0]()}"
            )


def _scan(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield the uses of a few popular workloads, and each night one use of each of 300 others, one after the other."""
    pick = _popular(rng, 20, 0.8)
    yield from (_use(start.timestamp() + time, pick()) for time in _poisson(rng, 7 * DAY, 300.0))
    for night in range(7):
        for number in range(300):
            yield _use(start.timestamp() + night * DAY + 2 * 3600.0 + number * 30, f"nightly-{number}")


def _weekday(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield uses of 12 workloads on weekdays at nine, some days missed, and of others at any time, for six weeks."""
    for day in (start + timedelta(number) for number in range(42)):
        for number in range(12):
            if day.weekday() < 5 and rng.random() > 0.08:
                moment = day + timedelta(hours=9, seconds=rng.gauss(number * 20, 120))
                yield _use(moment.timestamp(), f"at-nine-{number}")
    pick = _popular(rng, 100, 0.6)
    yield from (_use(start.timestamp() + time, pick()) for time in _poisson(rng, 42 * DAY, 400.0))


def _moving(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield uses of workloads that are used for two hours, and never again: what was used last is all that matters."""
    for number in range(900):
        begin = number * 900.0
        for time in _poisson(rng, 7200.0, 400.0):
            yield _use(start.timestamp() + begin + time, f"short-lived-{number}")


def _bursts(rng: random.Random, start: datetime) -> Iterator[Access]:
    """Yield uses of new workloads that several replicas are started of, within three minutes, and never again."""
    for number in range(2000):
        begin = start.timestamp() + number * 60.0
        for _ in range(6):
            yield _use(begin + rng.uniform(0, 180.0), f"new-{number}")


MAKERS: Final[Mapping[str, Callable[[random.Random, datetime], Iterator[Access]]]] = {
    "zipf": _zipf,
    "diurnal": _diurnal,
    "scan": _scan,
    "weekday": _weekday,
    "moving": _moving,
    "bursts": _bursts,
}


def _use(time: float, name: str) -> Access:
    """Return a use; the workload's name decides about its size."""
    return Access(time, name, random.Random(name).choice(SIZES) * GIB)


def _poisson(rng: random.Random, length: float, mean: float) -> Iterator[float]:
    """Yield times within `length` seconds, `mean` seconds apart on average."""
    time = rng.expovariate(1 / mean)
    while time < length:
        yield time
        time += rng.expovariate(1 / mean)


def _popular(rng: random.Random, count: int, exponent: float) -> Callable[[], str]:
    """Return what picks a name: the n-th as often as n to the power of -exponent."""
    sums = list(accumulate((number + 1) ** -exponent for number in range(count)))
    return lambda: f"{bisect(sums, rng.random() * sums[-1]):03}"

"""What the bench makes of the costs that it has measured."""

from __future__ import annotations

import random
from itertools import cycle, pairwise

import pytest

from tests.bench.figures import Pair, compare, interval


def test_interval_leaves_out_what_is_rare() -> None:
    values = [float(value) for value in range(11)]
    random.Random(1).shuffle(values)
    assert interval(values) == (1, 9)  # the second value from each end, as in any table of the sign test


@pytest.mark.parametrize("count", [0, 1, 5])
def test_interval_needs_six_values(count: int) -> None:
    assert interval([1.0] * count) is None
    assert interval([1.0] * 6) == (1, 1)


def test_interval_holds_the_true_median_in_95_of_100_runs() -> None:
    draw = random.Random(2)
    found = [interval([draw.lognormvariate(0, 0.2) for _ in range(15)]) for _ in range(2000)]
    held = sum(1 for between in found if between and between[0] <= 1 <= between[1])
    assert 0.95 <= held / len(found) <= 0.98


def test_interval_narrows_with_more_rounds() -> None:
    draw = random.Random(3)
    values = [draw.lognormvariate(0, 0.2) for _ in range(200)]
    widths = [high - low for count in (10, 50, 200) if (found := interval(values[:count])) for low, high in [found]]
    assert all(narrower < wider for wider, narrower in pairwise(widths)), widths


def test_comparison_tells_the_interval_of_its_rounds() -> None:
    costs = cycle([1.0, 1.1, 0.9, 1.2, 1.0, 0.8, 1.05])
    figure = compare(Pair("x", lambda: next(costs), lambda: 1.0), lane="here", rounds=13)
    assert figure.between is not None
    assert figure.between[0] < figure.ratio < figure.between[1]


@pytest.mark.parametrize(("noise", "rounds"), [(0.01, 14), (0.5, 42)])
def test_noise_makes_more_rounds(noise: float, rounds: int) -> None:
    draw = random.Random(4)
    pair = Pair("x", lambda: draw.lognormvariate(0, noise), lambda: draw.lognormvariate(0, noise))
    assert compare(pair, lane="here", rounds=14, most=42).n == rounds


@pytest.mark.parametrize("noise", [0.02, 0.06, 0.1, 0.2])
def test_rounds_that_are_added_favour_neither_side(noise: float) -> None:
    draw = random.Random(5)
    pair = Pair("x", lambda: draw.lognormvariate(0, noise), lambda: draw.lognormvariate(0, noise))
    ratios = [compare(pair, lane="here", rounds=14, most=42).ratio for _ in range(2000)]
    assert sum(1 for ratio in ratios if ratio <= 1) / len(ratios) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("rounds", [7, 8, 11, 14])
def test_who_goes_first_does_not_matter(rounds: int) -> None:
    """The side that begins a round, and so works twice in a row, pays for it."""
    last = ""

    def work(side: str) -> float:
        nonlocal last
        repeated, last = side == last, side
        return 1.1 if repeated else 1.0

    figure = compare(Pair("x", lambda: work("ours"), lambda: work("stock")), lane="here", rounds=rounds)
    assert figure.ratio == pytest.approx(1)
    assert figure.n % 2 == 0

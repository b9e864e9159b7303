"""`make bench`: which lanes have the figures that are wanted; each of them is measured in a node of its lane.

`python -m tests.bench.lanes [--lane NAME] [figure…]`. Without a lane, both Debians are measured, and the lane
`cluster` where a pattern names one of its figures. All lanes are measured before a missed bar fails the command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.bench import cluster_start, groups
from tests.bench.figures import HEADING, compare, record, row
from tests.lanes import CLUSTERS, DEBIANS, LANES, ONE_NODE

LAB_PYTHON = "/opt/kybernate/bin/python"


def main(argv: Sequence[str]) -> int:
    """Return 1 when a figure misses its bar, 2 when a pattern matches none, and the lab's status when it fails."""
    arguments = _arguments(argv)
    lanes = lanes_for(arguments.lane, arguments.figures)
    if unknown := without_figure(lanes, arguments.figures):
        print(f"no figure of the lanes {', '.join(lanes)} matches {' '.join(unknown)}", file=sys.stderr)
        return 2
    statuses = [_measure(lane, arguments.figures or ["*"], arguments.rounds) for lane in lanes]
    return next(filter(None, reversed(statuses)), 0)


def lanes_for(lane: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the lanes in which figures are looked for."""
    if lane:
        return (lane,)
    return (*DEBIANS, CLUSTERS[0]) if patterns else DEBIANS


def without_figure(lanes: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the patterns that match no figure of any of the lanes."""
    names = [name for lane in lanes for name in groups.names(lane)]
    return [pattern for pattern in patterns if not groups.wanted(names, [pattern])]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--lane", choices=(*LANES, *CLUSTERS), default="")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds, in place of each figure's own number")
    parser.add_argument("figures", nargs="*", help="patterns of names")
    return parser.parse_args(argv)


def _measure(lane: str, patterns: Sequence[str], rounds: int) -> int:
    """Measure the figures of a lane that match, and return the status of what has failed last."""
    chosen = groups.wanted(groups.names(lane), patterns)
    outside = [name for name in chosen if name in cluster_start.NAMES]
    inside = [name for name in chosen if name not in outside]
    status = _measure_starts(lane, outside, rounds) if outside else 0
    if inside:
        bench = [LAB_PYTHON, "-m", "tests.bench", "--lane", lane, *[f"--rounds={rounds}"] * bool(rounds), *inside]
        status = subprocess.call([sys.executable, "tests/lab/run", *ONE_NODE, lane, "--", *bench]) or status
    return status


def _measure_starts(lane: str, names: Sequence[str], rounds: int) -> int:
    good = True
    print(HEADING, flush=True)
    for pair in cluster_start.pairs(lane):
        if pair.name in names:
            figure = compare(pair, lane=lane, rounds=rounds or cluster_start.ROUNDS)
            print(row(figure), flush=True)
            record([figure])
            good = good and figure.good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

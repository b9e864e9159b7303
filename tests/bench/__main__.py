"""`python -m tests.bench --lane NAME [figure…]`, in a node of the lab: measure, print the table, keep the figures.

`make bench` runs it in each lane that has one of the figures (`tests/bench/lanes.py`).
"""

from __future__ import annotations

import argparse
import sys

from tests.bench import cluster, groups, starts
from tests.bench.figures import HEADING, Figure, compare, record, row
from tests.bench.free_memory import free_memory_kept

ROUNDS = {"2GiB": 14, "256MiB": 14}
MOST = 3  # times as many, where the machine has much else to do
ROUNDS_OF_SMALL_ONES, ROUNDS_OF_STARTS, ROUNDS_OF_CLUSTER = 16, 30, 6


def main() -> int:
    """Return 1 when a figure misses its bar, 2 when none is measured here."""
    arguments = _arguments()
    figures: list[Figure] = []
    with free_memory_kept():
        for pair in groups.pairs(arguments.lane, arguments.figures):
            if not figures:
                print(HEADING, flush=True)
            rounds = arguments.rounds or _rounds(pair.name)
            most = rounds if arguments.rounds else rounds * MOST
            figures.append(compare(pair, lane=arguments.lane, rounds=rounds, most=most))
            print(row(figures[-1]), flush=True)
            record(figures[-1:])
    if not figures:
        print(f"no figure in a node of lane {arguments.lane} matches {' '.join(arguments.figures)}", file=sys.stderr)
        return 2
    return 0 if all(figure.good for figure in figures) else 1


def _rounds(name: str) -> int:
    if name in starts.NAMES:
        return ROUNDS_OF_STARTS
    if name in cluster.NAMES:
        return ROUNDS_OF_CLUSTER
    return ROUNDS.get(name.rpartition(".")[2], ROUNDS_OF_SMALL_ONES)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench", description=__doc__)
    parser.add_argument("--lane", required=True, help="what the figures are kept under")
    parser.add_argument("--rounds", type=int, help="measured rounds, in place of each figure's own number")
    parser.add_argument("figures", nargs="*", default=["*"], help="patterns of names, all figures without any")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

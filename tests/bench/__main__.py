"""`python -m tests.bench --lane NAME [figure…]`, in a node of the lab: measure, print the table, keep the figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial

from tests.bench import (
    agent,
    checkpoint,
    cluster,
    large_store,
    memory,
    peer,
    proxy_wake,
    registry,
    seats,
    starts,
    store_transfer,
    tiers,
    trust,
)
from tests.bench.figures import HEADING, Figure, Pair, compare, record, row
from tests.bench.free_memory import free_memory_kept
from tests.lanes import CLUSTERS

ROUNDS = {"2GiB": 14, "256MiB": 14}
MOST = 3  # times as many, where the machine has much else to do
ROUNDS_OF_SMALL_ONES, ROUNDS_OF_STARTS, ROUNDS_OF_CLUSTER = 16, 30, 6
Group = tuple[Sequence[str], Callable[[], Iterator[Pair]]]


def main() -> int:
    """Return 1 when a figure misses its bar."""
    arguments = _arguments()
    print(HEADING, flush=True)
    figures: list[Figure] = []
    with free_memory_kept():
        for pair in _pairs(arguments.lane, arguments.figures):
            rounds = arguments.rounds or _rounds(pair.name)
            most = rounds if arguments.rounds else rounds * MOST
            figures.append(compare(pair, lane=arguments.lane, rounds=rounds, most=most))
            print(row(figures[-1]), flush=True)
            record(figures[-1:])
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


def _pairs(lane: str, patterns: list[str]) -> Iterator[Pair]:
    """Yield the comparisons whose names match; a size of which none is wanted is not even prepared."""
    for names, pairs in [(cluster.NAMES, cluster.pairs)] if lane in CLUSTERS else _groups():
        if any(_wanted(name, patterns) for name in names):
            yield from (pair for pair in pairs() if _wanted(pair.name, patterns))


def _groups() -> list[Group]:
    """Return what is measured in a node without a cluster: names, and what prepares and yields their comparisons."""
    groups: list[Group] = [(checkpoint.names(size), partial(checkpoint.pairs, size)) for size in checkpoint.SIZES]
    groups += [((name,), partial(starts.pairs, name)) for name in starts.NAMES]
    groups += [((name,), partial(trust.pairs, name)) for name in trust.NAMES]
    groups += [(registry.NAMES, registry.pairs)]
    groups += [(agent.NAMES, agent.pairs)]
    groups += [(tiers.NAMES, tiers.pairs), (seats.NAMES, seats.pairs)]
    groups += [(large_store.NAMES, large_store.pairs), (store_transfer.NAMES, store_transfer.pairs)]
    groups += [(peer.NAMES, peer.pairs), (proxy_wake.NAMES, proxy_wake.pairs)]
    return [*groups, *((memory.names(count), partial(memory.pairs, count)) for count in memory.PODS)]


def _wanted(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())

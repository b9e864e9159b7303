"""What is measured in which lane: names of figures, and what prepares and yields their comparisons.

Lanes without a cluster have the same figures. Those of `cluster_start` are measured on the machine, and not in a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial

from tests.bench import (
    agent,
    checkpoint,
    cluster,
    cluster_idle,
    cluster_start,
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
from tests.bench.figures import Pair
from tests.lanes import CLUSTERS

Group = tuple[Sequence[str], Callable[[], Iterator[Pair]]]


def names(lane: str) -> list[str]:
    """Return the names of all figures of a lane."""
    found = [name for names, _ in groups(lane) for name in names]
    return [*cluster_start.NAMES, *found] if lane in CLUSTERS else found


def pairs(lane: str, patterns: Sequence[str]) -> Iterator[Pair]:
    """Yield the comparisons whose names match, in a node of the lane; a group of which none does is not prepared."""
    for names, prepared in groups(lane):
        if wanted(names, patterns):
            yield from (pair for pair in prepared() if wanted([pair.name], patterns))


def wanted(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return those of the names that match one of the patterns."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def groups(lane: str) -> list[Group]:
    """Return what is measured in a node of the lane, in order."""
    if lane in CLUSTERS:
        return [(cluster_idle.NAMES, cluster_idle.pairs), (cluster.NAMES, cluster.pairs)]
    groups: list[Group] = [(checkpoint.names(size), partial(checkpoint.pairs, size)) for size in checkpoint.SIZES]
    groups += [((name,), partial(starts.pairs, name)) for name in starts.NAMES]
    groups += [((name,), partial(trust.pairs, name)) for name in trust.NAMES]
    groups += [(registry.NAMES, registry.pairs)]
    groups += [(agent.NAMES, agent.pairs)]
    groups += [(tiers.NAMES, tiers.pairs), (seats.NAMES, seats.pairs)]
    groups += [(large_store.NAMES, large_store.pairs), (store_transfer.NAMES, store_transfer.pairs)]
    groups += [(peer.NAMES, peer.pairs), (proxy_wake.NAMES, proxy_wake.pairs)]
    return [*groups, *((memory.names(count), partial(memory.pairs, count)) for count in memory.PODS)]

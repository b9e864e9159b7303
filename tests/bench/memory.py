"""What idle pods cost in memory: private pages (USS), and all pages in proportion to who shares them (PSS)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from tests.bench.figures import Pair
from tests.bench.shims import FORK_SERVER, daemons, named, settle
from tests.system.ctr import KYBERNATE, STOCK, Ctr, run

PODS = (1, 20, 100)
BARS = {1: 1.5, 20: 1.0, 100: 1.0}
IDLE_SECONDS = 3.0
SIDE_BY_SIDE = 4
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """MiB per pod: the median of the daemons' private memory; their proportional one, the fork server's included."""

    uss: float
    pss: float


def names(count: int) -> tuple[str, str]:
    return f"memory.uss.{count}-pods", f"memory.pss.{count}-pods"


def pairs(count: int) -> Iterator[Pair]:
    """Yield the comparisons for so many pods on the node; one population serves both."""
    settle()

    @cache
    def cost(runtime: str) -> Cost:
        return _measure(Ctr(runtime), count)

    uss, pss = names(count)
    bar = BARS[count]
    yield Pair(uss, lambda: cost(KYBERNATE).uss, lambda: cost(STOCK).uss, bar, "MiB", within=count)
    yield Pair(pss, lambda: cost(KYBERNATE).pss, lambda: cost(STOCK).pss, bar, "MiB", within=count)


def _measure(ctr: Ctr, count: int) -> Cost:
    ids = [ctr.new_id() for _ in range(count)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            list(pool.map(lambda id: run(ctr.run_argv(id, "sleep", "1000", flags=["-d"])), ids))
            time.sleep(IDLE_SECONDS)
            return _cost(ctr, count)
        finally:
            list(pool.map(ctr.remove, ids))


def _cost(ctr: Ctr, count: int) -> Cost:
    of_daemons = [process.memory_full_info() for process in daemons(ctr)]
    assert len(of_daemons) == count, f"{len(of_daemons)} daemons for {count} pods"
    servers = [process.memory_full_info() for process in named(FORK_SERVER)] if ctr.runtime == KYBERNATE else []
    return Cost(
        statistics.median(memory.uss for memory in of_daemons) / MIB,
        sum(memory.pss for memory in [*of_daemons, *servers]) / count / MIB,
    )

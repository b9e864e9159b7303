"""Starting, running and entering containers through `ctr`: figures without a bar yet, to see where we stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from tests.bench.figures import Pair, seconds
from tests.system.ctr import KYBERNATE, STOCK, Ctr, run

NAMES = ("preview.run-detached", "preview.run-to-end", "preview.exec")


def start(ctr: Ctr) -> float:
    """Return the seconds of `ctr run -d`."""
    id = ctr.new_id()
    try:
        return seconds(lambda: run(ctr.run_argv(id, "sleep", "1000", flags=["-d"])))
    finally:
        ctr.remove(id)


def live(ctr: Ctr) -> float:
    """Return the seconds of `ctr run --rm … true`."""
    return seconds(lambda: ctr.run("true"))


def pairs() -> Iterator[Pair]:
    """Yield the comparisons; the containers that are entered live while theirs is measured."""
    ours, stock = Ctr(KYBERNATE), Ctr(STOCK)
    yield Pair(NAMES[0], lambda: start(ours), lambda: start(stock), bar=None)
    yield Pair(NAMES[1], lambda: live(ours), lambda: live(stock), bar=None)
    with ExitStack() as running:
        id_ours, id_stock = (running.enter_context(ctr.running("sleep", "1000")) for ctr in (ours, stock))
        yield Pair(
            NAMES[2],
            lambda: seconds(lambda: ours.exec(id_ours, "true")),
            lambda: seconds(lambda: stock.exec(id_stock, "true")),
            bar=None,
        )

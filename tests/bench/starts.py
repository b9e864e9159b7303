"""Starting, running and entering containers, through `ctr` and through CRI, and what that costs in CPU time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from tests.bench.figures import Pair, seconds
from tests.bench.shims import CpuMeter, make_cold, settle, without_fork_server
from tests.system.cri import Cri, Pod
from tests.system.ctr import KYBERNATE, STOCK, Ctr, run

HANDLERS = ("kybernate", "runc")
LIVES = 5  # containers per measurement of CPU time, because containerd's own is counted in hundredths of a second
BARS: dict[str, float | None] = {
    "start.run-detached": 1.0,
    "start.run-to-end": 1.0,
    "start.exec": 1.0,
    "start.pod": 1.0,
    "start.ten-pods": 1.0,
    "start.cpu-per-life": 1.25,
    "start.first-on-node": 3.0,
    "direct.run-detached": None,
    "direct.run-to-end": None,
    "direct.pod": None,
    "direct.cpu-per-life": None,
}
NAMES = tuple(BARS)
Work = Callable[[], float]


def pairs(name: str) -> Iterator[Pair]:
    """Yield the comparison `name`, with the node as it is to be while it is measured."""
    kind = name.partition(".")[2]
    with without_fork_server() if name.startswith("direct.") else _settled(), SIDES[kind]() as (ours, stock):
        yield Pair(name, ours, stock, BARS[name])


@contextmanager
def _settled() -> Iterator[None]:
    settle()
    yield


def detached(ctr: Ctr) -> float:
    """Return the seconds of `ctr run -d`."""
    id = ctr.new_id()
    try:
        return seconds(lambda: run(ctr.run_argv(id, "sleep", "1000", flags=["-d"])))
    finally:
        ctr.remove(id)


def first(ctr: Ctr) -> float:
    """Return the seconds of `ctr run -d` on a node that has started nothing before."""
    make_cold()
    return detached(ctr)


def to_end(ctr: Ctr) -> float:
    """Return the seconds of `ctr run --rm … true`."""
    return seconds(lambda: ctr.run("true"))


@contextmanager
def _by_ctr(work: Callable[[Ctr], float]) -> Iterator[tuple[Work, Work]]:
    yield lambda: work(Ctr(KYBERNATE)), lambda: work(Ctr(STOCK))


@contextmanager
def _exec() -> Iterator[tuple[Work, Work]]:
    """Enter containers that live as long as the measurement."""
    ours, stock = Ctr(KYBERNATE), Ctr(STOCK)
    with ExitStack() as running:
        id_ours, id_stock = (running.enter_context(ctr.running("sleep", "1000")) for ctr in (ours, stock))
        yield (
            lambda: seconds(lambda: ours.exec(id_ours, "true")),
            lambda: seconds(lambda: stock.exec(id_stock, "true")),
        )


@contextmanager
def _pods(count: int) -> Iterator[tuple[Work, Work]]:
    """Run `count` pods of one started container each concurrently, and remove them outside the measured time."""
    with ExitStack() as clients, ThreadPoolExecutor(count) as pool:
        cris = [Cri(handler) for handler in HANDLERS]
        for cri in cris:
            clients.callback(cri.close)

        def start(cri: Cri) -> float:
            pods: list[Pod] = []

            def all_at_once() -> None:
                pods.extend(pool.map(lambda _: _pod(cri), range(count)))

            cost = seconds(all_at_once)
            list(pool.map(cri.remove_pod, pods))
            return cost

        yield lambda: start(cris[0]), lambda: start(cris[1])


def _pod(cri: Cri) -> Pod:
    pod = cri.run_pod()
    cri.run(pod, "c", ["sleep", "1000"])
    return pod


@contextmanager
def _cpu() -> Iterator[tuple[Work, Work]]:
    """Measure the CPU time of all processes of a shim, the runtimes that it executes among them, per container."""
    meter = CpuMeter()

    def lives(ctr: Ctr) -> float:
        before = meter.seconds()
        for _ in range(LIVES):
            ctr.run("true")
        return (meter.seconds() - before) / LIVES

    try:
        yield lambda: lives(Ctr(KYBERNATE)), lambda: lives(Ctr(STOCK))
    finally:
        meter.close()


SIDES = {
    "run-detached": lambda: _by_ctr(detached),
    "run-to-end": lambda: _by_ctr(to_end),
    "first-on-node": lambda: _by_ctr(first),
    "exec": _exec,
    "pod": lambda: _pods(1),
    "ten-pods": lambda: _pods(10),
    "cpu-per-life": _cpu,
}

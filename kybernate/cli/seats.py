"""`kybernate seats`: what the arbiter would do on a trace of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kybernate.cli.formats import Format, Output, Table
from kybernate.cli.output import seconds
from kybernate.node.failure import Invalid
from kybernate.seats.simulation.goodput import WANTED, goodput, models_per_gpu
from kybernate.seats.simulation.plot import goodput_chart
from kybernate.seats.simulation.simulate import POLICIES, Outcome, Setup, replay
from kybernate.seats.simulation.traces import SYNTHETIC, Arrival, read_trace

PREFIX = "synthetic:"
HEADER = ("POLICY", "P50", "P99", "WITHIN", "SWITCHES/H", "BUSY", "FAIRNESS", "REQUESTS")
MODELS_HEADER = ("POLICY", "MODELS")
STEPS = 24  # of the chart

app = typer.Typer(help="Show and simulate seats on the node's GPUs.", invoke_without_command=True)

FORMAT = "docs/seats.md describes the format"


def register(parent: typer.Typer) -> None:
    """Add the group of commands."""
    app.callback()(seats)
    app.command()(simulate)
    app.command()(models)
    parent.add_typer(app, name="seats")


def seats(
    context: typer.Context,
    all: Annotated[bool, typer.Option("--all", help="Also list free seats.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue with a line for each change.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List the seats of the node, and what each does or waits for."""
    if context.invoked_subcommand is None:
        from kybernate.cli.seat_states import list_seats  # the simulator needs no agent

        list_seats(output, all=all, watch=watch)


Gpus = Annotated[int, typer.Option(min=1, max=10_000, metavar="NUMBER", help="GPUs, on nodes of eight.")]
Wake = Annotated[float, typer.Option(min=0, max=3600, metavar="SECONDS", help="Duration of a wake.")]
Sleep = Annotated[float, typer.Option(min=0, max=3600, metavar="SECONDS", help="Duration of a suspend.")]
Bound = Annotated[
    float, typer.Option(min=0, max=3600, metavar="SECONDS", help="A request that begins later counts as late.")
]


def simulate(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help=f"A file, or one of {', '.join(PREFIX + one for one in SYNTHETIC)}.")
    ],
    gpus: Gpus = 8,
    wake: Wake = 1.5,
    suspend: Sleep = 1.0,
    bound: Bound = 10.0,
    output: Output = Format.TABLE,
) -> None:
    """Replay a trace of requests by three policies: in order of arrival, by priority, and the arbiter's own.

    P50 and P99 are seconds until a request is worked on, WITHIN the share of those that are so within the bound.
    """
    setup = Setup(gpus, 1, wake, suspend, bound)
    arrivals = _read(trace)
    outcomes = [replay(arrivals, policy, setup) for policy in POLICIES]
    Table(HEADER, _row, _document, len(HEADER), lambda one: one.policy).show(output, outcomes)


def models(
    rate: Annotated[
        float, typer.Option(min=1e-3, max=600, metavar="NUMBER", help="Requests of one model per minute.")
    ] = 1.0,
    work: Annotated[float, typer.Option(min=0.1, max=600, metavar="SECONDS", help="Duration of a request.")] = 2.0,
    wake: Wake = 1.5,
    suspend: Sleep = 1.0,
    bound: Bound = 10.0,
    chart: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also write a chart.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print how many models one GPU serves so that 90 % of requests begin within the bound.

    Requests come at random times (Poisson).
    """
    setup = Setup(1, 1, wake, suspend, bound)
    with _opened(chart) as file:
        found = [(policy, models_per_gpu(policy, setup, rate / 60, work)) for policy in POLICIES]
        if file is not None:
            file.write(_chart(setup, rate / 60, work, max(1, *(number for _, number in found))))
    named = Table(MODELS_HEADER, lambda one: one, _models_document, len(MODELS_HEADER), lambda one: one[0])
    named.show(output, found)


@contextmanager
def _opened(chart: Path | None) -> Iterator[TextIO | None]:
    """Open the chart's file, before what is drawn is computed. Raises Invalid."""
    if chart is None:
        yield None
        return
    try:
        file = chart.open("w", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Invalid(f"the chart cannot be written to {str(chart)!r}: {error}", advice="name a file") from error
    with file:
        yield file


def _chart(setup: Setup, rate: float, work: float, most: int) -> str:
    numbers = sorted({max(1, round(2 * most * step / STEPS)) for step in range(1, STEPS + 1)})
    lines = {
        policy: [(float(n), goodput(policy, n, replace(setup), rate, work, 3600.0).goodput) for n in numbers]
        for policy in POLICIES
    }
    return goodput_chart(lines, WANTED)


def _read(trace: str) -> list[Arrival]:
    if trace.startswith(PREFIX):
        maker: Callable[[], Iterator[Arrival]] | None = SYNTHETIC.get(trace.removeprefix(PREFIX))
        if maker is None:
            raise Invalid(f"there is no trace {trace}", advice=f"there are {', '.join(SYNTHETIC)}")
        return list(maker())
    try:
        with Path(trace).open(encoding="utf-8") as file:
            found = read_trace(file)
    except (OSError, ValueError) as error:
        raise Invalid(f"the trace cannot be read: {error}", advice=FORMAT) from error
    if not found:
        raise Invalid("the trace has no requests", advice=FORMAT)
    return found


def _row(one: Outcome) -> tuple[object, ...]:
    return (
        one.policy,
        seconds(one.quantile(0.5)),
        seconds(one.quantile(0.99)),
        f"{one.goodput:.1%}",
        f"{one.switches_per_hour:.2f}",
        f"{one.utilisation:.1%}",
        f"{one.fairness:.3f}",
        len(one.waits),
    )


def _document(one: Outcome) -> dict[str, object]:
    return {
        "policy": one.policy,
        "p50_seconds": one.quantile(0.5),
        "p99_seconds": one.quantile(0.99),
        "within_bound": one.goodput,
        "switches_per_hour": one.switches_per_hour,
        "utilisation": one.utilisation,
        "fairness": one.fairness,
        "requests": len(one.waits),
    }


def _models_document(one: tuple[str, int]) -> dict[str, object]:
    return {"policy": one[0], "models": one[1]}

"""`kybernate seats` and `kybernate why`: what the arbiter knows of each seat, and why one is not active."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kybernate.cli.agents import NO_AGENT_ADVICE, agent_or_none
from kybernate.cli.formats import (
    NONE,
    Format,
    Output,
    Table,
    document_of,
    show_document,
    until_interrupted,
)
from kybernate.cli.options import ContainerName, Namespace
from kybernate.cli.output import moment, seconds, show_fields, size
from kybernate.client import Agent
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Unavailable
from kybernate.node.words import word

HEADER = ("SEAT", "STATUS", "SINCE", "CONTAINER", "NEEDS", "HOLDS", "TURN IN", "REASON", "GPUS", "PRIORITY", "ASKED BY",
          "BEFORE", "ERROR")  # fmt: skip
NARROW = 8


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(why)


def why(container: ContainerName, namespace: Namespace = "", output: Output = Format.TABLE) -> None:
    """Show why a container, or a seat, is not active: what is before it, and when its turn is."""
    with _agent() as agent:
        seat = agent.seat(container, namespace)
    if show_document(document_of(seat), output, seat.name):
        return
    fields: dict[str, object] = {
        "seat": f"{seat.name}, GPU {', '.join(map(str, seat.gpus))}",
        "container": seat.container_title or NONE,
        "status": f"{_status(seat)} for {_ago(moment(seat.since))}",
        "asked by": _asked(seat),
        "why": seat.reason or NONE,
        "before it": ", ".join(seat.before) or NONE,
        "its turn": _turn(seat),
    }
    if seat.error:
        fields["last error"] = seat.error
        fields["tried again"] = f"in {seconds(max(0.0, moment(seat.retry_at) - time.time()))}"
    show_fields(fields)


def list_seats(format: Format, *, all: bool, watch: bool) -> None:
    """Print the seats that containers have, and with `all` the free ones; with `watch`, a line for each change."""
    with _agent() as agent:
        TABLE.show(format, agent.seats(all=all))
        if not watch:
            return
        with until_interrupted():
            for seat in _changes(agent):
                TABLE.show_change(format, seat)


def _changes(agent: Agent) -> Iterator[wire.Seat]:
    listed = False
    for change in agent.watch(["seat"]):
        listed = listed or change.bookmark == wire.BOOKMARK_SNAPSHOT_END
        if listed and change.HasField("seat"):
            yield change.seat


@contextmanager
def _agent() -> Iterator[Agent]:
    with agent_or_none() as agent:
        if agent is None:
            raise Unavailable("seats need an agent, and none runs on this node", advice=NO_AGENT_ADVICE)
        yield agent


def _row(seat: wire.Seat) -> tuple[object, ...]:
    return (
        seat.name,
        _status(seat),
        _ago(moment(seat.since)),
        seat.container_title or NONE,
        size(seat.need_bytes) if seat.need_bytes else NONE,
        size(seat.held_bytes) if seat.held_bytes else NONE,
        _turn(seat),
        seat.reason or NONE,
        ",".join(map(str, seat.gpus)),
        seat.priority,
        _asked(seat),
        ",".join(seat.before) or NONE,
        seat.error or NONE,
    )


def _status(seat: wire.Seat) -> str:
    return word(wire.Seat.Status, seat.status)


def _ago(since: float) -> str:
    return seconds(max(0.0, time.time() - since)) if since else NONE


def _turn(seat: wire.Seat) -> str:
    if not seat.HasField("turn_at"):
        return NONE
    left = moment(seat.turn_at) - time.time()
    return seconds(left) if left > 0 else "now"


def _asked(seat: wire.Seat) -> str:
    return ", ".join(f"{one.cause} {_ago(moment(one.at))} ago" for one in seat.requests) or NONE


TABLE = Table(HEADER, _row, document_of, NARROW, lambda seat: seat.name)

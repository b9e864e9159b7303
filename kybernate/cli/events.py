"""`kybernate events`: what has happened on the node, as its agent has noted it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from kybernate.cli.agents import required_agent
from kybernate.cli.formats import NONE, Format, Output, Table, document_of, until_interrupted
from kybernate.cli.output import age, moment
from kybernate.client import Agent
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import short_id

HEADER = ("AGE", "LEVEL", "TYPE", "SUBJECT", "MESSAGE", "ID", "OPERATION", "FIELDS")
NARROW = 5
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d+)([smhd])")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(events)


def _duration(text: str) -> float:
    match = DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 30s, 10m, 2h, 1d")
    return int(match[1]) * UNITS[match[2]]


def events(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TYPE]...", help="Types or patterns such as 'operation.*'.", show_default="all"),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Only events newer than this, such as 10m.", show_default="all that are kept"
        ),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue, and print new events.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List the events of the node, oldest first.

    The agent keeps events for a day. They are numbered without gaps.
    """
    begin = time.time() - _duration(since) if since else 0.0
    wanted = types or ["*"]
    with required_agent() as agent:
        found = _past(agent)
        shown = [one for one in found if _is_wanted(one, wanted) and moment(one.time) >= begin]
        TABLE.show(output, shown)
        if watch:
            _watch(agent, found[-1].id if found else 0, wanted, output)


def row(one: wire.Event) -> tuple[str, ...]:
    """Return the line of an event in a table, with all columns."""
    return (
        age(time.time() - moment(one.time)),
        one.level,
        one.type,
        short_id(one.container) or one.image or NONE,
        one.message,
        str(one.id),
        one.operation or NONE,
        " ".join(f"{key}={value}" for key, value in sorted(one.fields.items())) or NONE,
    )


def _past(agent: Agent) -> list[wire.Event]:
    """Return the events that are kept."""
    found, last = [], agent.revision()
    for change in agent.watch(["event"]):
        if change.HasField("event"):
            found.append(change.event)
        if change.revision >= last:  # events follow the snapshot's end, and the last one has its revision
            break
    return sorted(found, key=lambda one: one.id)


def _watch(agent: Agent, last: int, wanted: list[str], format: Format) -> None:
    with until_interrupted():
        for one in _after(agent, last):
            if _is_wanted(one, wanted):
                TABLE.show_change(format, one)


def _after(agent: Agent, last: int) -> Iterator[wire.Event]:
    """Yield the events whose numbers are above `last`, as they come."""
    for change in agent.watch(["event"]):
        if change.HasField("event") and change.event.id > last:
            last = change.event.id
            yield change.event


def _is_wanted(one: wire.Event, patterns: list[str]) -> bool:
    return any(fnmatchcase(one.type, pattern) for pattern in patterns)


TABLE = Table(HEADER, row, document_of, NARROW, lambda one: str(one.id))

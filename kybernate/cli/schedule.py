"""`kybernate schedule`: which kind of work the windows of the week prefer, and what happens next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kybernate.agent.seat_settings import configuration_of, read_file
from kybernate.agent.settings import Settings
from kybernate.agent.tier_rules import zone_of
from kybernate.cli.agents import agent_or_none
from kybernate.cli.formats import NONE, Format, Output, Table, rfc3339
from kybernate.cli.output import moment, seconds
from kybernate.messages.agent_pb2 import Turn
from kybernate.node.failure import Invalid
from kybernate.seats.configuration import Configuration, SeatsInvalid
from kybernate.seats.windows import Change, changes, preferred

WEEK = 7 * 86400.0
HEADER = ("FROM", "IN", "PREFERRED", "SEAT", "CONTAINER", "REASON")


FORMAT = "docs/seats.md describes the configuration"
File = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="A YAML file, in place of the agent's configuration.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(schedule)


def schedule(file: File = None, output: Output = Format.TABLE) -> None:
    """Show what happens next: turns of waiting seats, and which kind of work comes first in the coming week."""
    turns = [] if file else _turns()
    configuration = configured(file) if file or not turns else _configured_or_none()
    rules, now = configuration.rules, time.time()
    if not rules.windows and not turns:
        raise Invalid(
            "no window is configured, and no seat waits", advice="set `schedule` in the configuration of seats"
        )
    windows = [Change(now, preferred(rules.windows, rules.zone, now)), *_week(configuration, now)]
    found = [*turns, *(windows if rules.windows else ())]

    def row(one: Change | Turn) -> tuple[object, ...]:
        at = moment(one.at) if isinstance(one, Turn) else one.at
        local = datetime.fromtimestamp(at, rules.zone).strftime("%a %Y-%m-%d %H:%M %Z") if at else NONE
        when = "now" if 0 < at <= now else seconds(at - now) if at else NONE
        if isinstance(one, Turn):
            return (local, when, NONE, one.seat, one.container_title or NONE, one.reason)
        return (local, when, one.prefer or NONE, NONE, NONE, NONE)

    Table(HEADER, row, _document, len(HEADER), _name).show(output, found)


def _turns() -> list[Turn]:
    """Return the turns that the agent knows of; none where no agent runs."""
    with agent_or_none() as agent:
        return list(agent.schedule()) if agent is not None else []


def _configured_or_none() -> Configuration:
    """Return this node's configuration; an empty one where the agent is that of another node, or has another one."""
    try:
        return configured(None)
    except Invalid:
        return Configuration()


def _name(one: Change | Turn) -> str:
    return one.seat if isinstance(one, Turn) else one.prefer


def configured(file: Path | None) -> Configuration:
    """Return the configuration of a file, else the agent's. Raises Invalid."""
    try:
        found = read_file(file, zone_of("")) if file else configuration_of(Settings.load().seats)
    except SeatsInvalid as error:
        raise Invalid(str(error), advice=FORMAT) from error
    if found is None:
        raise Invalid("this node has no seats: `seats.file` is not set in agent.toml", advice=FORMAT)
    return found


def _week(configuration: Configuration, now: float) -> Iterator[Change]:
    rules = configuration.rules
    return (one for one in changes(rules.windows, rules.zone, now) if one.at <= now + WEEK)


def _document(one: Change | Turn) -> dict[str, object]:
    if isinstance(one, Turn):
        at = rfc3339(moment(one.at))
        return {"from": at, "preferred": "", "seat": one.seat, "container": one.container_title, "reason": one.reason}
    at = datetime.fromtimestamp(one.at, UTC).isoformat()
    return {"from": at, "preferred": one.prefer, "seat": "", "container": "", "reason": ""}

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
from kybernate.cli.formats import NONE, Format, Output, Table
from kybernate.cli.output import seconds
from kybernate.node.failure import Invalid
from kybernate.seats.configuration import Configuration, SeatsInvalid
from kybernate.seats.windows import Change, changes, preferred

WEEK = 7 * 86400.0
HEADER = ("FROM", "IN", "PREFERRED")


FORMAT = "docs/seats.md describes the configuration"
File = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="A YAML file, in place of the agent's configuration.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(schedule)


def schedule(file: File = None, output: Output = Format.TABLE) -> None:
    """Show the windows of the coming week: which kind of work comes first from when on."""
    configuration = configured(file)
    rules, now = configuration.rules, time.time()
    if not rules.windows:
        raise Invalid("no window is configured", advice="set `schedule` in the configuration of seats")
    found = [Change(now, preferred(rules.windows, rules.zone, now)), *_week(configuration, now)]

    def row(one: Change) -> tuple[object, ...]:
        local = datetime.fromtimestamp(one.at, rules.zone).strftime("%a %Y-%m-%d %H:%M %Z")
        return (local, "now" if one.at == now else seconds(one.at - now), one.prefer or NONE)

    Table(HEADER, row, _document, len(HEADER), lambda one: one.prefer).show(output, found)


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


def _document(one: Change) -> dict[str, object]:
    return {"from": datetime.fromtimestamp(one.at, UTC).isoformat(), "preferred": one.prefer}

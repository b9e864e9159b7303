"""`kybernate top`: a live page of the node's GPUs, containers, operations and tiers; or the page once, for scripts."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from kybernate.cli.agents import required_agent
from kybernate.cli.output import echo, show_columns
from kybernate.cli.top_tables import TABLES, heading, shown
from kybernate.client.watching import NodeView, snapshot_of
from kybernate.messages import agent_pb2 as wire

KINDS = ("container", "gpu", "operation", "tier")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the page once, for scripts and logs.")] = False,
    seconds: Annotated[
        float, typer.Option("--for", min=0, metavar="SECONDS", help="End after that time.", show_default="with q")
    ] = 0,
) -> None:
    """Show GPUs, containers, operations and tiers, live.

    Tables scroll and sort by keys: `?` shows the keys, `q` ends. The page stays while the agent is away.
    """
    with required_agent() as agent:
        node = agent.node()
        if once or not sys.stdout.isatty():
            show_page(node, snapshot_of(agent.watch(KINDS)), time.time())
            return
        from kybernate.cli.top_page import TopPage, following  # textual, which no other command needs

        TopPage(node, following(agent), seconds=seconds).run()


def show_page(node: wire.Node, view: NodeView, now: float) -> None:
    """Print the page; `now` is the time in seconds since 1970."""
    echo(heading(node))
    for table, rows in shown(TABLES, view, now):
        echo(f"\n{table.title}")
        show_columns(table.columns, [row.cells for row in rows])

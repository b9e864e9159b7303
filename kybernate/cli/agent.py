"""`kybernate agent`: the node agent, in the foreground, as a service manager starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.reporting import not_installed


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(agent)


def agent(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The agent's settings.")] = Path(
        "/etc/kybernate/agent.toml"
    ),
    check: Annotated[bool, typer.Option("--check", help="Examine the settings and exit.")] = False,
) -> None:
    """Run the node agent until SIGTERM; SIGHUP reads its settings again."""
    try:
        from kybernate.agent import program  # what it loads, no other command needs
        from kybernate.agent.settings import Settings
    except ImportError as error:
        raise not_installed("the agent", error, "agent") from error
    if not check:
        program.run(config)
        return
    for warning in Settings.load(config).warnings:
        typer.echo(f"kybernate: {warning}", err=True)

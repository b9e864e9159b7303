"""`kybernate setup`: puts Kybernate into this node's containerd."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.asking import require_agreement
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.options import ADDRESS, Address
from kybernate.install.containerd import PROGRAM_PLACE, has_shim, installed, planned, set_up


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Put Kybernate into the programs of this node.", no_args_is_help=True)
    group.command()(containerd)
    group.callback()(_group)
    app.add_typer(group, name="setup")


def _group() -> None:
    """Put Kybernate into the programs of this node."""


def containerd(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="containerd's main configuration file.", show_default="found"),
    ] = None,
    restart: Annotated[
        str,
        typer.Option(
            "--restart",
            metavar="COMMAND",
            help="Command that restarts containerd.",
            show_default="systemctl restart of its service",
        ),
    ] = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Write the shim, add the handler `kybernate` to containerd's configuration, restart it, and run a container.

    Shows the difference first. containerd is restarted only if it reads everything else in its configuration as before;
    running containers keep running. After a failure, the earlier configuration is back. It may be run again.
    """
    found = installed(config)
    changed, difference = planned(found)
    shown = {"containerd": ".".join(map(str, found.release)), "config": str(found.files.main), "difference": difference}
    if not (output.is_document or output == Format.NAME):
        typer.echo(f"containerd {shown['containerd']}, configured by {shown['config']}")
        typer.echo(difference or "the handler kybernate is configured")
        if not has_shim():
            typer.echo(f"{PROGRAM_PLACE} will be written")
    if dry_run:
        document = {"changed": list(map(str, changed)), "restarted": False, "verified": False, "pending": ""}
        show_document({**shown, **document}, output, "\n".join(map(str, changed)))
        return
    if changed:
        require_agreement("write this and restart containerd?", yes=yes, state="nothing was changed")
    done = set_up(
        found,
        changed,
        restart=shlex.split(restart),
        address=address,
        step=lambda words: typer.echo(words, err=True),
    )
    document = {
        **shown,
        "changed": list(map(str, done.changed)),
        "restarted": done.restarted,
        "verified": done.verified,
        "pending": done.pending,
    }
    if show_document(document, output, "\n".join(map(str, done.changed))):
        return
    if done.pending:
        typer.echo(done.pending)
    else:
        typer.echo("a container ran under Kybernate: pods with runtimeClassName: kybernate will")

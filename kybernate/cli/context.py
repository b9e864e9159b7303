"""`kybernate context`: the agents that commands may call, by name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kybernate.cli.agents import LOCAL
from kybernate.cli.completion import a_context
from kybernate.cli.formats import Format, Output, Table, show_document
from kybernate.cli.output import show_fields
from kybernate.client import contexts
from kybernate.client.contexts import Context, Contexts

HEADER = ("CURRENT", "NAME", "ADDRESS", "FILE")
Listed = tuple[Context, Contexts]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Manage the contexts: agents that commands can call by name.", no_args_is_help=True)
    group.command()(ls)
    group.command()(use)
    group.command()(show)
    app.add_typer(group, name="context")


def ls(output: Output = Format.TABLE) -> None:
    """List the contexts."""
    known = contexts.load()
    TABLE.show(output, [(one, known) for _, one in sorted(known.by_name.items())])


def use(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CONTEXT",
            help="Name of a context; local is this node.",
            show_default=False,
            autocompletion=a_context,
        ),
    ],
) -> None:
    """Make a context the current one, which commands use without --agent."""
    file = contexts.use(name)
    typer.echo(f"{name} is the current context, by {file}")


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[CONTEXT]", help="Name of a context.", show_default="the current one", autocompletion=a_context
        ),
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Show a context."""
    known = contexts.load()
    chosen = name or known.current
    if not chosen:
        if not show_document(None, output, LOCAL):
            typer.echo("no context is chosen: commands call the agent of this node")
        return
    one = known.named(chosen)
    if not show_document(_document((one, known)), output, one.name):
        show_fields({key: value for key, value in _document((one, known)).items() if key != "current"})


def _document(listed: Listed) -> dict[str, Any]:
    one, known = listed
    tls = one.tls
    return {
        "name": one.name,
        "current": one.name == known.current,
        "address": one.address,
        "ca": str(tls.ca) if tls else "",
        "certificate": str(tls.certificate) if tls else "",
        "key": str(tls.key) if tls else "",
        "server_name": tls.server_name if tls else "",
        "file": str(one.file),
    }


def _row(listed: Listed) -> tuple[object, ...]:
    one, known = listed
    return ("*" if one.name == known.current else "", one.name, one.address, one.file)


TABLE = Table(HEADER, _row, _document, len(HEADER), lambda listed: listed[0].name)

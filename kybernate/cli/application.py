"""The whole command line, by typer: every command, its help, its completion, and what it says of a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kybernate.cli.commands import COMMANDS
from kybernate.cli.declared import declare
from kybernate.cli.reporting import is_expected, report
from kybernate_shim import __version__

HELP = "Checkpoint, restore and suspend the containers of this node."


class Reporting(TyperGroup):
    """A group of commands whose expected failures are explained."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if is_expected(error):
                raise typer.Exit(report(error)) from error
            raise


def application(words: Sequence[str] = ()) -> typer.Typer:
    """Return the program with the commands that the arguments `words` need: all, unless the first word is one."""
    app = typer.Typer(
        name="kybernate",
        cls=Reporting,
        epilog="KYBERNATE_TRACE=1 adds a traceback to every failure.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,  # help as other tools of the field print it; brackets mean what is optional
        pretty_exceptions_enable=False,
    )
    app.callback(help=HELP)(_options)
    first = words[0] if words else ""
    for module in [COMMANDS[first]] if first in COMMANDS else dict.fromkeys(COMMANDS.values()):
        import_module(f"kybernate.cli.{module}").register(app)
    for command in _functions(app):
        declare(command)
    return app


def _functions(app: typer.Typer) -> Iterator[Any]:
    yield from (one.callback for one in app.registered_commands)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _functions(group.typer_instance)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kybernate {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options before the command. typer requires a function for them."""

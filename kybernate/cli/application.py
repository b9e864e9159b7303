"""The whole command line, by typer: every command, its help, its completion, and what it says of a mistake."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kybernate.addresses import AGENT_VARIABLE
from kybernate.cli.commands import BY_AGENT, COMMANDS
from kybernate.cli.declared import declare, spelled
from kybernate.cli.options import AGENT
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


class Command(TyperCommand):
    """A command; `--json` is another spelling of `--output json`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        of_program = ctx.parent is not None and ctx.parent.parent is None
        return [*params[:-1], *_shared_params(), *params[-1:]] if of_program and self.name in BY_AGENT else params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        has_output = any("--output" in one.opts for one in self.params)
        return super().parse_args(ctx, spelled(args) if has_output else args)


def _choose(agent: str) -> None:
    if agent:
        os.environ[AGENT_VARIABLE] = agent


Agent = Annotated[
    str,
    typer.Option(
        *AGENT.names, help=AGENT.help, metavar=AGENT.metavar, show_default=False, callback=_choose, expose_value=False
    ),
]


def _shared_params() -> list[Any]:
    """Return the options that many commands have, as typer makes them."""

    def shared(agent: Agent = "") -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(shared)
    return list(typer.main.get_command(app).params)


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
    for command in _commands(app):
        command.cls = Command
        declare(command.callback)
    return app


def _commands(app: typer.Typer) -> Iterator[Any]:
    yield from app.registered_commands
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(group.typer_instance)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kybernate {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    agent: Agent = "",
) -> None:
    """Hold the options before the command. typer requires a function for them."""

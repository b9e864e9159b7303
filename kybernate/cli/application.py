"""The whole command line, by typer: every command, its help, its completion, and what it says of a mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kybernate.addresses import AGENT_VARIABLE
from kybernate.cli.commands import BY_AGENT, COMMANDS, GROUPS
from kybernate.cli.declared import declare, spelled
from kybernate.cli.options import AGENT
from kybernate.cli.reporting import is_expected, report
from kybernate_shim import __version__

UNSAID = re.compile(
    r"; (?:required|(?:[\d.]+<=)?x[<>]=[\d.]+)(?=\])|  \[(?:required|(?:[\d.]+<=)?x[<>]=[\d.]+)\]"
)  # the usage and the metavar say it
LONGEST = 200  # characters of a command's first sentence
HELP = "Checkpoint, restore and suspend the containers of this node."


class Group(TyperGroup):
    """A group of commands, whose help has the whole first sentence of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _spelled(self, args))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        self.format_section(ctx, formatter, "Commands", self.list_commands(ctx))

    def format_section(self, ctx: Any, formatter: Any, title: str, names: Sequence[str]) -> None:
        """Print a list of commands."""
        known = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(name, one.get_short_help_str(LONGEST)) for name, one in known if one is not None and not one.hidden]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class Program(Group):
    """All commands. Expected failures are explained."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        grouped = {name for names in GROUPS.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in grouped]
        last = list(GROUPS)[-1]
        for title, names in GROUPS.items():
            self.format_section(ctx, formatter, title, (*names, *others) if title == last else names)

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

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return [self.options_metavar or "", *(_usage(one) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _spelled(self, args))


def _spelled(command: Any, args: list[str]) -> list[str]:
    return spelled(args) if any("--output" in one.opts for one in command.params) else args


def _format_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments and options, without the types that Python has for them."""
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for one in command.get_params(ctx):
        if (record := one.get_help_record(ctx)) is None:
            continue
        text = UNSAID.sub("", record[1])
        is_argument = one.param_type_name == "argument"
        rows["Arguments" if is_argument else "Options"].append((_bare(one) if is_argument else record[0], text))
    for title, lines in rows.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)


def _bare(argument: Any) -> str:
    """Return the name of an argument without brackets and dots."""
    return str(argument.metavar or argument.name.upper()).removesuffix("...").strip("[]")


def _usage(argument: Any) -> str:
    name = _bare(argument) if argument.required else f"[{_bare(argument)}]"
    return name if argument.nargs == 1 else f"{name}..."


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


def application(words: Sequence[str] = (), *, completes: bool = False) -> typer.Typer:
    """Return the program with the commands that the arguments `words` need: all, unless the first word is one.

    A shell that `completes` the first word needs their names alone, and to load all of them takes longer than a user
    waits for a key.
    """
    app = typer.Typer(
        name="kybernate",
        cls=Program,
        epilog="KYBERNATE_TRACE=1 adds a traceback to every failure.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,  # help as other tools of the field print it; brackets mean what is optional
        pretty_exceptions_enable=False,
    )
    app.callback(help=HELP)(_options)
    first = words[0] if words else ""
    if first in COMMANDS or not completes:
        for module in [COMMANDS[first]] if first in COMMANDS else dict.fromkeys(COMMANDS.values()):
            import_module(f"kybernate.cli.{module}").register(app)
    else:
        for name in COMMANDS:
            app.command(name)(_named)
    for command in _commands(app):
        command.cls = Command
        declare(command.callback)
    return app


def _named() -> None:
    """Stand for a command of which only the name is needed."""


def _commands(app: typer.Typer) -> Iterator[Any]:
    yield from app.registered_commands
    for group in app.registered_groups:
        group.cls = Group
        if group.typer_instance is not None:
            of_group = group.typer_instance.registered_callback
            if of_group is not None and of_group.callback is not None:
                declare(of_group.callback)
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

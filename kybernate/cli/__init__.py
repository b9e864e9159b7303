"""The command line `kybernate`. One module is one command or one group of them, and adds itself by its `register`."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.cli import (
    checkpoint,
    cuda,
    doctor,
    encrypt,
    images,
    importing,
    inspect,
    keys,
    pool,
    restore,
    status,
    suspend,
    swap,
)
from kybernate.cli.reporting import Reporting
from kybernate_shim import __version__

MODULES = (checkpoint, restore, images, inspect, importing, keys, encrypt, status, suspend, swap, pool, cuda, doctor)

HELP = "Checkpoint, restore and suspend the containers of this node."


def main() -> None:
    """Run the program; exits with 0, 1 after a failure, 2 after a usage error, 130 after an interrupt."""
    application()(prog_name="kybernate")


def application() -> typer.Typer:
    """Return the program with all its commands."""
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
    for module in MODULES:
        module.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kybernate {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Hold what stands before the command. typer wants a function for it."""

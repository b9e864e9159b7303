"""The command line `kybernate`. One module is one command or one group of them, and adds itself by its `register`.

A command is run by its own module alone: to load all of them takes longer than most commands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from kybernate.cli.reporting import Reporting
from kybernate_shim import __version__

RUST_THREADS = "obstore"

# The module of each command, in the order of the help.
COMMANDS = {
    "checkpoint": "checkpoint",
    "release": "release",
    "restore": "restore",
    "images": "images",
    "inspect": "inspect",
    "import": "importing",
    "export": "export",
    "push": "push",
    "pull": "pull",
    "registry": "registry",
    "store": "store",
    "keys": "keys",
    "encrypt": "encrypt",
    "decrypt": "encrypt",
    "ps": "status",
    "status": "status",
    "suspend": "suspend",
    "resume": "suspend",
    "swap": "swap",
    "ops": "ops",
    "wait": "ops",
    "cancel": "ops",
    "events": "events",
    "top": "top",
    "promote": "tiers",
    "demote": "tiers",
    "prefetch": "tiers",
    "evict": "tiers",
    "pin": "tiers",
    "unpin": "tiers",
    "pool": "pool",
    "cuda": "cuda",
    "doctor": "doctor",
    "agent": "agent",
}

HELP = "Checkpoint, restore and suspend the containers of this node."


def main() -> None:
    """Run the program; exits with 0, 1 after a failure, 2 after a usage error, 130 after an interrupt."""
    try:
        application(sys.argv[1:])(prog_name="kybernate")
    finally:
        if RUST_THREADS in sys.modules:
            _leave(sys.exc_info()[1])


def _leave(ending: BaseException | None) -> None:
    """End the process without ending the interpreter, where obstore has threads.

    Before 3.14, an interpreter that ends kills any thread that asks for its lock. A thread of Rust's that is killed so
    aborts the process: one of ten commands, after it had done its work. All else has ended by now.
    """
    if isinstance(ending, SystemExit):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))


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
    """Hold the options before the command. typer requires a function for them."""

"""How failures reach the terminal: facts on stderr and exit status 1, never a traceback for what was to be expected."""

from __future__ import annotations

import os
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from kybernate.cli.output import printable
from kybernate.node.failure import Failure
from kybernate_shim.config import ConfigInvalid
from kybernate_shim.trace import VARIABLE as TRACE
from kybernate_shim.undo import in_words

KEPT = "\n\t"  # what a message of ours is made of, and what it quotes cannot abuse


class Interrupted(Failure):
    """The user pressed Ctrl-C. `state` says which work continues without us."""


STATUS: dict[type[Exception], int] = {Interrupted: 130}  # as shells count a death by SIGINT


class Reporting(TyperGroup):
    """A group of commands whose expected failures are explained."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Failure, ConfigInvalid) as error:
            report(error)
            raise typer.Exit(STATUS.get(type(error), 1)) from error


def report(error: Exception) -> None:
    """Print what failed and why, the state of things, and what to do."""
    typer.echo(f"kybernate: {printable(in_words(error), keep=KEPT)}", err=True)
    for title in ("state", "advice"):
        if text := getattr(error, title, ""):
            typer.echo(f"  {title + ':':7} {printable(str(text), keep=KEPT)}", err=True)
    if os.environ.get(TRACE):
        typer.echo("".join(traceback.format_exception(error)), err=True)

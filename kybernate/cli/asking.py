"""Questions before a command does what cannot be undone, or trusts something. The answer is no unless it is yes."""

from __future__ import annotations

import sys

import typer

from kybernate.node.failure import Refused


def require_agreement(question: str, *, yes: bool, state: str) -> None:
    """Ask on the terminal, unless `yes`. Raises Refused; `state` says what is true then."""
    if yes:
        return
    if not is_terminal():
        raise Refused(
            "this needs a confirmation, and stdin is not a terminal", state=state, advice="use --yes in scripts"
        )
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, or the end of the input
        agreed = False
    if not agreed:
        raise Refused("not confirmed", state=state)


def is_terminal() -> bool:
    """Return whether a user can answer."""
    return sys.stdin.isatty()

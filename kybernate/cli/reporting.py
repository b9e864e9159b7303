"""How failures reach the terminal: facts on stderr and an exit code, never a traceback for what was to be expected."""

from __future__ import annotations

import os
import sys

from kybernate.cli.exit_codes import exit_code_of
from kybernate.cli.output import echo, printable
from kybernate.node.failure import Failure, Invalid, Unavailable
from kybernate_shim.trace import VARIABLE as TRACE
from kybernate_shim.undo import in_words

KEPT = "\n\t"  # kept as they are in our messages; a text that is quoted cannot do harm with them


class Interrupted(Failure):
    """The user pressed Ctrl-C. `state` says which work continues without us."""


def not_installed(what: str, error: ImportError, extras: str) -> Unavailable:
    """Return the failure of a command whose optional libraries are not there; `extras` of the package bring them."""
    alone = isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kybernate")
    why = f"needs {error.name}, which is not installed" if alone else f"cannot be loaded: {error}"
    return Unavailable(
        f"{what} {why}", advice=f"pip install 'kybernate[{extras}]' into the environment of this command"
    )


def is_expected(error: Exception) -> bool:
    """Return whether it is a failure to be explained; other errors are defects."""
    if isinstance(error, Failure):
        return True
    config = sys.modules.get("kybernate_shim.config")  # without this module loaded, no configuration was read
    return config is not None and isinstance(error, config.ConfigInvalid)


def report_defect(error: Exception) -> int:
    """Print an error that no command expects, in one sentence, and return the exit status.

    A word of the command line that is not UTF-8 is no defect: messages and most names cannot have it.
    """
    if isinstance(error, UnicodeEncodeError) and isinstance(error.object, str):
        return report(Invalid(f"{error.object!a} is not UTF-8", advice="give a name or a path that is"))
    what = f"{type(error).__name__}: {in_words(error)}"
    echo(f"kybernate: unexpected error: {printable(what, keep=KEPT)}", err=True)
    echo(f"  advice: this is a defect of Kybernate; {TRACE}=1 prints where it is, for a report of it", err=True)
    _trace(error)
    return 1


def report(error: Exception) -> int:
    """Print what failed and why, the state of things, and what to do; return the exit code."""
    echo(f"kybernate: {printable(in_words(error), keep=KEPT)}", err=True)
    for title in ("state", "advice"):
        if text := getattr(error, title, ""):
            echo(f"  {title + ':':7} {printable(str(text), keep=KEPT)}", err=True)
    _trace(error)
    return int(exit_code_of(error))


def _trace(error: Exception) -> None:
    """Print the traceback where it was asked for."""
    if os.environ.get(TRACE):
        import traceback

        echo("".join(traceback.format_exception(error)), err=True)

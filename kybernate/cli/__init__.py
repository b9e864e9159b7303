"""The command line `kybernate`.

A command is run by its own module alone: to load all of them takes longer than most commands do, and so does typer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from kybernate.addresses import AGENT_VARIABLE
from kybernate.cli.commands import COMMANDS, PROMPT

RUST_THREADS = "obstore"
COMPLETE = "_KYBERNATE_COMPLETE"  # in the environment: typer's scripts ask what may follow


def main() -> None:
    """Run the program, and exit with one of the codes of exit_codes.py."""
    completes = COMPLETE in os.environ
    words = ordered(completed_words(os.environ) if completes else sys.argv[1:])
    if not completes and (call := prompt_call(words)) is not None:
        sys.exit(_status(call))
    from kybernate.cli.application import application  # not for those that are called promptly

    try:
        application(words, completes=completes)(words, prog_name="kybernate")
    except Exception as error:  # noqa: BLE001  # a user reads a sentence, whatever it is
        from kybernate.cli.reporting import report_defect

        sys.exit(report_defect(error))
    finally:
        if RUST_THREADS in sys.modules:
            _leave(sys.exc_info()[1])


def completed_words(environment: Mapping[str, str]) -> list[str]:
    """Return the words that a shell completes, the last of which is not whole, as typer's scripts pass them."""
    text = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    return text.split()[1:]


def prompt_call(words: Sequence[str]) -> Callable[[], Any] | None:
    """Return the call that a command line asks for, None where typer has to understand it."""
    if not words or words[0] not in PROMPT:
        return None
    from kybernate.cli.declared import NotUnderstood, parsed

    command = getattr(import_module(f"kybernate.cli.{COMMANDS[words[0]]}"), words[0])
    from kybernate.cli.options import AGENT

    try:
        arguments = parsed(command, words[1:], {"agent": AGENT})
    except NotUnderstood:
        return None
    if agent := arguments.pop("agent", ""):
        os.environ[AGENT_VARIABLE] = agent
    return lambda: command(**arguments)


def ordered(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--agent`, where it comes first, after the command's name."""
    if len(words) > 2 and words[0] == "--agent" and not words[2].startswith("-"):
        return [words[2], f"--agent={words[1]}", *words[3:]]
    if len(words) > 1 and words[0].startswith("--agent=") and not words[1].startswith("-"):
        return [words[1], words[0], *words[2:]]
    return list(words)


def _status(call: Callable[[], Any]) -> int:
    """Run a command and return its exit status, as typer's group does."""
    from kybernate.cli.reporting import is_expected, report, report_defect
    from kybernate_shim.imports import without

    with without("ssl"):  # which asyncio loads for what none of these commands does
        import grpc  # noqa: F401  # by which each of them makes its first call
    try:
        call()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end
        return 1
    except Exception as error:  # noqa: BLE001  # a user reads a sentence, whatever it is
        return report(error) if is_expected(error) else report_defect(error)
    return 0


def _leave(ending: BaseException | None) -> None:
    """End the process without ending the interpreter, where obstore has threads.

    Before 3.14, an interpreter that ends kills any thread that asks for its lock. A Rust thread that is killed in
    this way aborts the process: one of ten commands, after it had done its work. All else has ended by now.
    """
    if isinstance(ending, SystemExit):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))

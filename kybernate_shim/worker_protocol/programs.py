"""How a worker is started: `python -m PROGRAM --protocol=VERSION ARGUMENT…`, by a process of the same release.

An upgrade replaces the files below a daemon or a helper that keeps running. A program that they start then may have
another protocol version. It ends with a line on stderr that says so, before it does anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

VERSION: Final = 5  # to be increased with every change of a job, an answer, or the frames
_FLAG: Final = "--protocol="


def command(program: str, *arguments: str) -> list[str]:
    """Return the command that starts the worker `program`, the name of a module."""
    return [sys.executable, "-m", program, f"{_FLAG}{VERSION}", *arguments]


def arguments(argv: Sequence[str]) -> list[str]:
    """Return what `command` was given, in the process that it has started; end where that is of another release."""
    _, *rest = argv
    if not rest or rest[0] != f"{_FLAG}{VERSION}":
        sys.exit(
            f"{argv[0]} was started by a process of another release, which still runs after an upgrade: a pod's daemon"
            " ends with the pod, the CUDA helper by SIGTERM or when it is idle"
        )
    return rest[1:]

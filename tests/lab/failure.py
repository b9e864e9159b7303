"""The one error of the lab that its user reads: what failed, why, what to do."""

from __future__ import annotations

import functools
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.syscalls import die_with_parent


class LabFailed(Exception):
    """The lab could not be built or started; the text says what to do."""


def check(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> None:
    """Run `argv` with its output on stderr; raise LabFailed with argv and status when it fails.

    It is killed if this process is, so that a build never continues without the lock that guards it.
    """
    words = [str(word) for word in argv]
    try:
        status = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=2, env=env, check=False,
            preexec_fn=functools.partial(die_with_parent, signal.SIGKILL),  # this process has no threads
        ).returncode  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise LabFailed(f"{words[0]} does not start: {error}") from error
    if status:
        raise LabFailed(f"{shlex.join(words)[:500]} ended with status {status}; its reasons stand above")

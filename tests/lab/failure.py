"""The one error of the lab that its user reads: what failed, why, what to do."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class LabFailed(Exception):
    """The lab could not be built or started; the text says what to do."""


def check(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run `argv` with its output on stderr; raise LabFailed with argv and status when it fails."""
    words = [str(word) for word in argv]
    try:
        status = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, env=env, cwd=cwd, check=False).returncode
    except OSError as error:
        raise LabFailed(f"{words[0]} does not start: {error}") from error
    if status:
        raise LabFailed(f"{shlex.join(words)[:500]} ended with status {status}; its reasons stand above")

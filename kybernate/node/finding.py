"""What the report on a node consists of, and how it asks programs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "bad"]
PROGRAM_SECONDS = 60


@dataclass(frozen=True)
class HealthFinding:
    """One line of the report. `advice` is empty where nothing needs to be done.

    `verdict`: "ok", "note" (works, but knows better) or "bad" (something that Kybernate is for will fail).
    """

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def ask_program(*argv: str, warnings: bool = True) -> tuple[int, str]:
    """Run a program and return its status and what it printed, the status 127 where it cannot be run.

    Without `warnings`, of a program that has succeeded only what is on its stdout.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    errors = done.stderr if warnings or done.returncode else ""
    return done.returncode, (done.stdout + errors).strip()

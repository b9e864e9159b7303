"""What the report on a node consists of, and how it asks programs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kybernate.node.failure import Failure
from kybernate_shim.checkpoint.criu.config import parse_version

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


def looked(subject: str, look: Callable[[], Iterator[HealthFinding]]) -> Iterator[HealthFinding]:
    """Yield what a look finds; one that is not allowed to see something, or fails, is a finding itself."""
    try:
        yield from look()
    except PermissionError as error:
        yield HealthFinding(subject, "note", f"cannot be examined: {error}", "run as root")
    except (OSError, Failure) as error:
        advice = getattr(error, "advice", "") or "look at what is named"
        yield HealthFinding(subject, "bad", f"cannot be examined: {error}", advice)


def compared(
    subject: str, found: str, version: str, tested: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> HealthFinding:
    """Compare a version with the oldest and the newest that are tested."""
    release = parse_version(version)[:2]
    if tested is None or not release or tested[0] <= release <= tested[1]:
        return HealthFinding(subject, "ok", found)
    oldest, newest = (".".join(map(str, one)) for one in tested)
    if release < tested[0]:
        return HealthFinding(subject, "bad", found, f"install {oldest} or newer")
    return HealthFinding(subject, "note", found, f"{newest} is the newest release that Kybernate was tested with")


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

"""How far a run of Ginkgo is, from what it has printed."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A mark for each spec, several on a line; those that failed or skipped themselves begin a line that says more.
MARKS = re.compile(r"^(?:\S \[[A-Z]+\]|[SP•]+)", re.MULTILINE)
WANTED = re.compile(r"^Will run (\d+) of \d+ specs", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """How many specs have ended, how many of these have failed, and how many there are; 0 before Ginkgo says so."""

    ended: int = 0
    failed: int = 0
    wanted: int = 0

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.ended} of {self.wanted} specs{failed}" if self.wanted else "starts"


def read(log: str) -> Progress:
    """Return the progress of a run. What was not chosen has a mark as well, and does not count."""
    found = WANTED.search(log)
    if found is None:
        return Progress()
    marks = MARKS.findall(log, found.end())
    said = [line for line in marks if "[" in line]
    skipped = sum("[SKIPPED]" in line for line in said)
    ended = sum(line.count("•") for line in marks if "[" not in line) + len(said)
    return Progress(ended, len(said) - skipped, int(found[1]))

"""The JSON lines in which runc and crun report errors.

Every call appends to the same file, so the caller remembers where it ended before. runc and crun write the same keys,
`level`, `msg` and `time`, in different order; crun also puts warnings at level `warning` before the error.
"""

from __future__ import annotations

import json
from pathlib import Path

TAIL_LIMIT = 256 * 1024  # bytes read of a runtime that talks more than anybody wants to know


def size(log: Path) -> int:
    """Return the length of the log in bytes, 0 when there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_error(log: Path, after: int = 0) -> str:
    """Return the message of the last error beyond byte `after`, or "". Lines that are not JSON objects are skipped."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(after, size(log) - TAIL_LIMIT))
            lines = stream.read(TAIL_LIMIT).splitlines()
    except OSError:
        return ""
    return next(filter(None, map(_error, reversed(lines))), "")


def _error(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(entry, dict) or entry.get("level") not in ("error", "fatal", "panic"):
        return ""
    return str(entry.get("msg") or "").strip()

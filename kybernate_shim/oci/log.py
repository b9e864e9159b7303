"""The JSON objects in which runc and crun report errors.

Every call appends to the same file, so the caller remembers where it ended before. runc and older crun write one object
per line, newer crun spreads each over several lines. All begin an object at the start of a line, with the keys `level`,
`msg` and `time`.
"""

from __future__ import annotations

import json
from pathlib import Path

TAIL_LIMIT = 256 * 1024  # bytes read of a runtime that logs too much


def size(log: Path) -> int:
    """Return the length of the log in bytes, 0 when there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_error(log: Path, after: int = 0) -> str:
    """Return the message of the last error beyond byte `after`, or "". What is not a JSON object is skipped."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(after, size(log) - TAIL_LIMIT))
            text = stream.read(TAIL_LIMIT).decode(errors="replace")
    except OSError:
        return ""
    # Nothing nested begins at the start of a line, so each of these is one object; what else follows it is passed over.
    objects = f"\n{text}".split("\n{")[1:]
    return next(filter(None, (_error("{" + rest) for rest in reversed(objects))), "")


def _error(text: str) -> str:
    try:
        entry, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ""
    if entry.get("level") not in ("error", "fatal", "panic"):
        return ""
    return str(entry.get("msg") or "").strip()

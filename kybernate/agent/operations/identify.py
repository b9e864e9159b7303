"""Ids of operations: they sort by time, and rise also where the clock is set back."""

from __future__ import annotations

import os

MILLISECONDS = 11  # hexadecimal digits: until the year 2527
RANDOM_BYTES = 5


def new_id(now: float, last: str) -> str:
    """Return an id for an operation of the time `now`, seconds since 1970, that sorts after the id `last`."""
    milliseconds = round(now * 1000)
    if last:
        milliseconds = max(milliseconds, int(last[:MILLISECONDS], 16) + 1)
    return f"{milliseconds:0{MILLISECONDS}x}{os.urandom(RANDOM_BYTES).hex()}"

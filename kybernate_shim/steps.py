"""A step of an operation and what it cost: the same for the log, the manifest, progress and the driver's verbs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Step:
    """One finished or running step. `seconds` is 0 until it has ended; bytes are 0 where it moves none.

    `spared` of the bytes needed no copy: they were there already, or are zeros.
    """

    name: str
    seconds: float = 0
    bytes: int = 0
    spared: int = 0

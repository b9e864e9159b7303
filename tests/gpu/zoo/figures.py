"""How a program of the zoo proves that nothing was lost: figures that repeat, and what is printed of them.

A program is a callable that makes what it keeps and returns a "round": a callable that yields labelled figures, and
begins from the same seeds each time. Two rounds are made before anything is printed, so a program whose figures differ
by themselves is told from one that was changed. From then on every figure of every round must be the same.

Lines: "figures X" (of all together, in the beginning), "step N checksum X", "wrong: …", "impossible: …".
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LINE_SECONDS = 0.05  # between two lines at least: a log of every figure would be long
Round = Callable[[], Iterator[tuple[str, int]]]


@dataclass(frozen=True)
class Options:
    """What a program is told: the size of what it keeps in `mib`, and "cuda", or "cpu" for a rehearsal."""

    mib: int = 256
    device: str = "cuda"
    prefix: str = ""


class Impossible(Exception):
    """This machine lacks what the program needs; the message says what."""


class Wrong(Exception):
    """A figure is another than before, or a call failed."""


_printing = threading.Lock()


def say(line: str) -> None:
    with _printing:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def require(right: bool, what: str) -> None:
    if not right:
        raise Wrong(what)


def checksum(data: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(data)


class Lines:
    """Prints that the program continues, not more often than is useful."""

    def __init__(self, prefix: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix, self._clock = prefix, clock
        self._last, self._step, self._sum = clock(), 0, 0

    def figure(self, value: int) -> None:
        self._sum = checksum(f"{self._sum} {value}".encode())
        if self._clock() - self._last >= LINE_SECONDS:
            self._last, self._step = self._clock(), self._step + 1
            say(f"{self._prefix}step {self._step} checksum {self._sum:08x}")


def prove(begin: Round, prefix: str = "", rounds: int | None = None) -> None:
    """Make rounds forever, or so many, and compare. Raises Wrong."""
    expected = dict(begin())
    for label, figure in begin():
        require(figure == expected[label], f"{label}: {figure} after {expected[label]}, before any suspend")
    say(f"{prefix}figures {checksum(repr(sorted(expected.items())).encode()):08x}")
    lines, number = Lines(prefix), 0
    while rounds is None or number < rounds:
        number += 1
        count = 0
        for label, figure in begin():
            require(figure == expected[label], f"{label}: {figure}, and it was {expected[label]}")
            lines.figure(figure)
            count += 1
        require(count == len(expected), f"a round of {count} figures in place of {len(expected)}")

"""How long a container may be frozen by a checkpoint: what says so, what is to be expected, and how long it was.

A container that is frozen answers no probe, no client and no peer of its own. The request, an annotation of the pod, or
the node says how long that may last. A checkpoint that cannot keep to it is refused before anything is frozen; one that
does not is undone when the time is over.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.oci.spec import Spec
from kybernate_shim.sizes import mib

ANNOTATION: Final = "kybernate.io/max-freeze"
NODE: Final = "`max_freeze` of the node"
REQUEST: Final = "the request"
LONGEST: Final = 16  # characters of the annotation
UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "": 1.0}
NONE: Final = "none"  # in words, for any time
ANY: Final = 365 * 86400.0  # seconds: as long, or longer, is no limit. No journal and no JSON knows infinity


def seconds_of(text: str) -> float:
    """Return the seconds of "2s", "500ms", "1.5" or "1m", ANY for "none". Raises ValueError."""
    if text == NONE:
        return ANY
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(ms|s|m|)", text, re.ASCII) if len(text) <= LONGEST else None
    if found is None or not (seconds := float(found[1]) * UNITS[found[2]]):
        raise ValueError(f'expected a time above 0 such as "2s" or "500ms", or "{NONE}", found {text[: 2 * LONGEST]!r}')
    return seconds


@dataclass(frozen=True)
class FreezeLimit:
    """The most seconds for which a container may be frozen, and what says so, in words."""

    seconds: float = ANY
    source: str = ""

    @property
    def is_set(self) -> bool:
        return self.seconds < ANY


def limit_of(asked: float, asked_by: str, spec: Spec, config: Config) -> FreezeLimit:
    """Return the first limit that is there: the request's, the annotation's, the node's. Raises Refused."""
    if asked:
        return FreezeLimit(asked, asked_by or REQUEST)
    if text := config.pods_choice(spec.annotations, ANNOTATION):
        try:
            return FreezeLimit(seconds_of(text), f"the annotation {ANNOTATION}")
        except ValueError as error:
            raise Refused(f"the annotation {ANNOTATION} has no valid time: {error}. Nothing was changed") from error
    return FreezeLimit(config.max_freeze, NODE) if config.max_freeze else FreezeLimit()


@dataclass(frozen=True)
class Expected:
    """What is known of a dump before it begins: `bytes` to be written at `rate` bytes a second, to memory or a disk."""

    bytes: int
    rate: float
    in_memory: bool
    exits: bool = False

    @property
    def seconds(self) -> float:
        """The shortest time that it can take: CRIU reads the memory as well, which cannot be measured before."""
        return self.bytes / self.rate

    def require(self, container: str, limit: FreezeLimit) -> None:
        """Raise Refused where the container would certainly be frozen for longer than it may be."""
        if self.seconds <= limit.seconds:
            return
        raise Refused(
            f"a checkpoint would freeze container {container} for at least {self.seconds:.1f} s ({mib(self.bytes)} at"
            f" {mib(round(self.rate))}/s), longer than the {limit.seconds:g} s that {limit.source} allows."
            f" {self.remedy} Nothing was changed"
        )

    @property
    def remedy(self) -> str:
        """What to do, in a sentence or two."""
        if self.in_memory:
            return "Allow more (--max-freeze), or checkpoint it when its processes use less memory."
        if self.exits:
            return (
                "It stays frozen until its image is on the disk, since it is to end (--exit). Allow more"
                " (--max-freeze), or choose a faster directory."
            )
        return (
            "The image goes to the disk directly, because the node has too little free memory for it, or `dump_memory`"
            " allows too little. Allow more (--max-freeze), or choose a faster directory."
        )


class Standstill:
    """The time for which one operation keeps a container frozen, and the end of the operation when that is too long.

    An async context around the operation and its undo. `begin` and `end` mark the freeze.
    """

    def __init__(self, container: str, operation: Operation) -> None:
        self._container, self._operation = container, operation
        self._limit, self._remedy = FreezeLimit(), ""
        self._began = 0.0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Standstill:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._too_long(self._operation.frozen_ms / 1000) from late

    def allow(self, limit: FreezeLimit, remedy: str) -> None:
        """Set the limit for what begins later."""
        self._limit, self._remedy = limit, remedy

    def begin(self) -> None:
        """The container is about to be frozen."""
        self._began = time.monotonic()
        self._operation.frozen_ms = 0
        if self._limit.is_set:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._limit.seconds)

    def end(self) -> None:
        """The container is not frozen any more, or has ended."""
        if self._began:
            self._operation.frozen_ms = self._operation.fields["frozen_ms"] = self.milliseconds
            self._began = 0.0
        self.stop_clock()

    def stop_clock(self) -> None:
        """Let what follows take any time: it cannot be undone."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)

    @property
    def milliseconds(self) -> int:
        """For how long it has been frozen by now, or was."""
        return round((time.monotonic() - self._began) * 1000) if self._began else self._operation.frozen_ms

    def require(self) -> None:
        """Raise Refused where it is frozen for too long by now, for what no clock may interrupt."""
        if (seconds := self.milliseconds / 1000) > self._limit.seconds:
            raise self._too_long(seconds)

    def _too_long(self, seconds: float) -> Refused:
        return Refused(
            f"the checkpoint of container {self._container} was undone: it had been frozen for {seconds:.2f} s, longer"
            f" than the {self._limit.seconds:g} s that {self._limit.source} allows. {self._remedy} There is no image,"
            " and it continues as before"
        )

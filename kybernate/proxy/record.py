"""What is known of a request, by whichever door it came: for metrics, access log and traces once it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from kybernate.proxy.routing import Head

CLIENT_GONE: Final = 499  # as nginx counts those


@dataclass(frozen=True)
class Trace:
    """Where a request is in a trace, by identifiers of 128 and 64 bits.

    `upstream` is the span that the model continues; `parent` is 0 where this request begins its trace.
    """

    trace_id: int
    own: int
    upstream: int
    parent: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """Return the header for the model."""
        return f"00-{self.trace_id:032x}-{self.upstream:016x}-{int(self.sampled):02x}"


@dataclass(frozen=True)
class LastWake:
    """The last wake of a model; `ended` is infinite while it lasts."""

    began: float
    ended: float
    outcome: str


@dataclass(kw_only=True)
class Record:
    """Times are of the monotonic clock, in seconds. `api` is the form of its errors, `owner` the name of its key."""

    id: str
    client: str
    head: Head
    api: str
    started: float = field(default_factory=time.monotonic)
    model: str = ""
    owner: str = ""
    cold: bool = False
    wake_ms: int = 0
    waited: float = 0.0
    status: int = 0
    reason: str = ""
    answered: float = 0.0  # when the answer began
    sent: int = 0
    trace: Trace | None = None  # None where no traces are exported
    held_since: float = 0.0
    held_until: float = 0.0  # 0 where it was refused
    woke: LastWake | None = None
    passed: float = 0.0  # when it was sent to the model

    @contextmanager
    def holding(self, woke: Callable[[], LastWake | None]) -> Iterator[None]:
        """Note since when and until when a request is held; `woke` returns the wake that it may have waited for."""
        self.held_since = time.monotonic()
        try:
            yield
            self.held_until = time.monotonic()
        finally:
            self.woke = woke()

    def all_of(self, name: str) -> Sequence[str]:
        """Return the values of a header, by its name in lower case."""
        value = self.head.headers.get(name)
        return () if value is None else (value,)


class Observer(Protocol):
    """Is given each request when it comes and once it has ended: metrics, access log and traces."""

    def began(self, record: Record) -> None: ...

    def ended(self, record: Record) -> None: ...


def code_of(record: Record) -> int:
    """Return the status that counts: that of a client which hung up is none that it was sent."""
    return CLIENT_GONE if record.reason == "client_gone" else record.status

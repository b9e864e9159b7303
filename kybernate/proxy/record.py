"""What is known of a request, by whichever door it came: for metrics and access log once it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from kybernate.proxy.routing import Head


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


class Observer(Protocol):
    """Is given each request that has ended: metrics, and the access log."""

    def ended(self, record: Record) -> None: ...

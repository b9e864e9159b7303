"""What a client knows of an operation, without I/O."""

from __future__ import annotations

import time

from kybernate.client.errors import NotFinished, require_success
from kybernate.client.requests import has_ended
from kybernate.messages import agent_pb2 as wire


class KnownOperation:
    """An operation of the agent. `state` is the newest that was seen of it."""

    def __init__(self, state: wire.Operation) -> None:
        self.state = state

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def done(self) -> bool:
        """Return whether the newest state is final."""
        return has_ended(self.state)

    def require_result(self) -> wire.Result:
        """Return what came of it. Raises OperationFailed and OperationCancelled."""
        return require_success(self.state).result

    def require_time(self, end: float | None, timeout: float | None) -> None:
        """Raise NotFinished after `end`, on the monotonic clock; `timeout` is what a caller waits for in all."""
        if end is not None and time.monotonic() >= end:
            raise NotFinished(f"operation {self.id} ({self.state.verb}) has not ended after {timeout:g} s")


def end_of(timeout: float | None) -> float | None:
    """Return when `timeout` seconds from now are over, None for never."""
    return None if timeout is None else time.monotonic() + timeout


def left_until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())

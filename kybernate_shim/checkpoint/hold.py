"""A container that stays frozen after its checkpoint, until it may run on or ends.

Its image is complete and shown restorable by then. A client that moves the container elsewhere ends it, and then
nothing has happened after the image. Else it runs on: by a release, or by the deadline, which is kept here, in the
shim's daemon, and not by a client that may be gone. containerd ends the containers of a daemon that was killed, so none
stays frozen.
"""

from __future__ import annotations

import asyncio
import time
from signal import SIGINT, SIGKILL, SIGQUIT, SIGRTMIN, SIGTERM
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.dump_request import Dumped

Over = Literal["released", "expired", "ended"]
# Those by which container images ask to be stopped, as systemd's do by the last one. Others wait for the thaw.
ENDING: Final = frozenset({SIGTERM, SIGINT, SIGQUIT, SIGKILL, SIGRTMIN + 3})


class FrozenHold:
    """One hold, of `seconds` at most. Made and used on the event loop."""

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[Dumped] = loop.create_future()
        self.over: asyncio.Future[Over] = loop.create_future()
        self._seconds = seconds
        self._until = 0.0

    @property
    def seconds_left(self) -> float:
        """How long it lasts if nothing ends it, 0 before it has begun and after its end."""
        if not self.begun.done() or self.over.done():
            return 0.0
        return max(0.001, self._until - time.monotonic())

    async def until_over(self, dumped: Dumped) -> Over:
        """Note that the image is there, and return how the hold has ended."""
        self._until = time.monotonic() + self._seconds
        timer = asyncio.get_running_loop().call_later(self._seconds, self.finish, "expired")
        self.begun.set_result(dumped)
        try:
            return await asyncio.shield(self.over)
        except asyncio.CancelledError:  # the daemon ends; an image that a client knows of stays
            self.finish("expired")
            return self.over.result()
        finally:
            timer.cancel()

    def finish(self, how: Over) -> None:
        """Let it be over; the first reason counts."""
        if not self.over.done():
            self.over.set_result(how)

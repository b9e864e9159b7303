"""Use of a GPU by a container that is suspended: the interface to what finds it out.

The arbiter runs one watcher. It takes a use as a request with the cause "use", unless the container's annotation
`kybernate.io/wake-on-use` is "false", and counts of calls as work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from kybernate.agent.seats.claims import Key


class UseWatcher(Protocol):
    """Finds out which containers use CUDA."""

    async def run(self, suspended: Callable[[], Collection[Key]], used: Callable[[Key], None]) -> None:
        """Watch until cancelled; raises no expected error.

        `suspended` returns the containers of which a use is a request now. `used` gets one within 100 ms of its first
        call that waits in the driver; again, at most once a second, for as long as it waits. Both are called on the
        event loop's thread and never block.
        """

    def calls(self, container: Key) -> int | None:
        """Return how many calls that count as work a container has made, None where that is not known.

        A rise between two looks shows that it works.
        """


class NoUse:
    """Sees nothing: containers wake on request alone."""

    async def run(self, suspended: Callable[[], Collection[Key]], used: Callable[[Key], None]) -> None:
        await asyncio.Event().wait()

    def calls(self, container: Key) -> int | None:
        return None

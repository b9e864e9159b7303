"""The seats of the node's agent, as its Watch reports them: whether there are some, and which have no room now."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Final

from kybernate.client.asynchronous import AsyncAgent
from kybernate.client.watching import NodeView
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

KINDS: Final = ("seat",)
AGAIN_SECONDS: Final = 0.5  # until the agent is watched again; what it reported last counts until then


class Seats:
    """The agent's seats while an `async with` runs. Entering raises Failure where the agent does not answer."""

    def __init__(self, agent: AsyncAgent) -> None:
        self._agent = agent
        self._view = NodeView()
        self.take = self._view.take  # one message of the Watch
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Seats:
        for one in await self._agent.seats(all=True):
            self.take(wire.Change(seat=one))
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def there(self) -> bool:
        """Return whether the agent has seats."""
        return bool(self._view.seats())

    def crowded(self, profile: str, container: str) -> bool:
        """Return whether a container's seat could be active only if another one left that is busy.

        One without a seat finds none where all of its profile have a container.
        """
        seats = self._view.seats()
        for seat in seats:
            if container and seat.container == container:
                return seat.crowded
        return all(seat.container for seat in seats if seat.profile == profile)

    async def _follow(self) -> None:
        while True:
            with suppress(Failure):
                async for change in self._agent.watch(KINDS):
                    self.take(change)
            await asyncio.sleep(AGAIN_SECONDS)

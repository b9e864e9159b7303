"""A tier that is opened when something is first asked of it: what others can do does not wait for its service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kybernate.store.tiers.tier import Held, Ref, Room, Source, Tier
from kybernate.store.transfer import Transfer


@dataclass(frozen=True)
class LaterTier:
    """The tier that `opened` returns. Each call raises what opening it does, too."""

    name: str
    level: int
    durable: bool
    opened: Callable[[], Awaitable[Tier]]

    async def images(self) -> AsyncIterator[Held]:
        async for held in (await self.opened()).images():
            yield held

    async def find(self, ref: Ref) -> Held:
        return await (await self.opened()).find(ref)

    async def open(self, ref: Ref) -> Source:
        return await (await self.opened()).open(ref)

    async def receive(self, source: Source, transfer: Transfer) -> Held:
        return await (await self.opened()).receive(source, transfer)

    async def discard(self, ref: Ref) -> None:
        await (await self.opened()).discard(ref)

    async def verify(self, ref: Ref) -> None:
        await (await self.opened()).verify(ref)

    async def remove(self, ref: Ref) -> None:
        await (await self.opened()).remove(ref)

    async def room(self) -> Room:
        return await (await self.opened()).room()

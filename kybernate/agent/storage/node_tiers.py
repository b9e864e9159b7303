"""The tiers of this node, as its settings have them: memory, disk, and an object store."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate.agent.settings import StoreSettings
from kybernate.agent.tier_settings import Tiers
from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.later import LaterTier
from kybernate.store.tiers.tier import Tier
from kybernate_shim.config import Config

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.tiers.object import ObjectTier

RAM, DISK, OBJECT = "ram", "disk", "object"  # names of tiers, the fastest first
INDEX = "store-index.db"

TIER_MISSING_ADVICE: Final = (
    "`memory_root` in shim.toml makes the tier `ram`, `store.url` in agent.toml the tier `object`"
)


class NodeTiers:
    """Opens the object store when it is first needed, and again when its settings have changed.

    `peer` returns the tier of another node.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        settings: Callable[[], StoreSettings],
        limits: Callable[[], Tiers],
        state_directory: Path,
        peer: Callable[[str], Tier] | None = None,
    ) -> None:
        self._config, self._settings, self._limits, self._peer = config, settings, limits, peer
        self._index = state_directory / INDEX
        self._opened: tuple[StoreSettings, ChunkStore] | None = None
        self._lock = asyncio.Lock()

    def local(self) -> list[DirectoryTier]:
        """Return the tiers of this node's files, the fastest first."""
        config, limits = self._config(), self._limits()
        disk = DirectoryTier(DISK, 2, config.checkpoint_root, quota=limits.disk.quota)
        if config.memory_root is None:
            return [disk]
        return [DirectoryTier(RAM, 1, config.memory_root, durable=False, quota=limits.ram.quota), disk]

    async def all(self) -> list[Tier]:
        """Return all tiers, the fastest first. Raises what opening the store does."""
        return [*self.local(), *([await self.object()] if self._settings().url else [])]

    def sources(self, target: str, nodes: Iterable[str]) -> list[Tier]:
        """Return the tiers that an image may be copied from, the fastest first; `nodes` are others that have it.

        The object store takes images of this node alone. Raises Failure.
        """
        if target == OBJECT:
            return [*self.local()]
        peers = map(self._peer, nodes) if self._peer is not None else ()
        local = [tier for tier in self.local() if tier.name != target]
        return [*local, *peers, *self._stored()]

    def others(self, name: str) -> list[Tier]:
        """Return the tiers without the one of that name, the fastest first."""
        return [tier for tier in (*self.local(), *self._stored()) if tier.name != name]

    async def peer(self, node: str) -> Tier:
        """Return the tier of another node. Raises Failure where no node is reached."""
        if self._peer is None:
            raise Failure(
                f"this agent is not configured to reach other nodes, such as {node}", advice=TIER_MISSING_ADVICE
            )
        return self._peer(node)

    def names(self) -> list[str]:
        """Return the names of all tiers, the fastest first."""
        return [*(tier.name for tier in self.local()), *([OBJECT] if self._settings().url else [])]

    async def named(self, name: str) -> Tier:
        """Return the tier of that name. Raises Failure, and what opening the store does."""
        if name == OBJECT and self._settings().url:
            return await self.object()
        for tier in self.local():
            if tier.name == name:
                return tier
        raise Failure(f"this node has no tier {name!r}: it has {', '.join(self.names())}", advice=TIER_MISSING_ADVICE)

    async def object(self) -> ObjectTier:
        """Return the object store. Raises StoreInvalid, StoreUnreachable, StoreDenied."""
        from kybernate.store.tiers.object import ObjectTier  # libraries of the extra `store`

        settings = self._settings()
        async with self._lock:
            if self._opened is None or self._opened[0] != settings:
                self.close()
                self._opened = settings, await self._open(settings)
        return ObjectTier(self._opened[1], settings.url, OBJECT)

    def _stored(self) -> list[Tier]:
        """Return the object store, if there is one. It need not answer as long as nothing is asked of it."""
        return [LaterTier(OBJECT, 3, durable=True, opened=self.object)] if self._settings().url else []

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    async def _open(self, settings: StoreSettings) -> ChunkStore:
        from kybernate.store.place import StorePlace, open_store

        place = StorePlace(
            settings.url, settings.key, settings.encrypted, settings.endpoint, settings.region, settings.ca
        )
        try:
            store = open_store(place, self._index)
        except sqlite3.DatabaseError:  # a copy of what the store says, damaged by a power failure: it is made again
            self._index.unlink(missing_ok=True)
            store = open_store(place, self._index)
        return await store.open()

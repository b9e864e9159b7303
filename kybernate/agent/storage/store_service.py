"""What the service of the object store lacks, as its probe finds it, in the agent's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.node_tiers import NodeTiers
from kybernate.node.failure import Failure


class StoreService:
    """Tries a store once: after the agent's start, and after its settings have changed."""

    def __init__(self, tiers: NodeTiers, settings: Callable[[], StoreSettings], log: Any) -> None:
        self._tiers, self._settings, self._log = tiers, settings, log
        self._tried: StoreSettings | None = None

    async def look(self) -> None:
        """Log what the service lacks. One that does not answer is tried again by the next call, without a word."""
        settings = self._settings()
        if settings == self._tried:
            return
        try:
            lacks = await (await self._tiers.object()).lacks()
        except (Failure, OSError, ImportError):
            return  # as `store.not_listed` says, or the next request
        self._tried = settings
        if lacks:
            self._log.warning("store.probed", store=settings.url, lacks=lacks)

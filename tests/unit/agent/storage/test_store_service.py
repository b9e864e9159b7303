"""What the object store's service lacks is logged once by an agent, however often it looks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.store_service import StoreService
from kybernate.store.errors import StoreUnreachable

VERSIONS = "the bucket keeps versions"


@dataclass
class Node:
    """An agent's tiers, its settings and its log. `away`: how many looks find no service."""

    lacks_: list[str]
    away: int = 0
    probes: int = 0
    settings: StoreSettings = field(default_factory=lambda: StoreSettings(url="s3://images"))
    logged: list[dict[str, Any]] = field(default_factory=list)

    def looks(self, number: int) -> list[dict[str, Any]]:
        service = StoreService(self, lambda: self.settings, self)  # type: ignore[arg-type]
        return asyncio.run(self._looks(service, number))

    async def _looks(self, service: StoreService, number: int) -> list[dict[str, Any]]:
        for _ in range(number):
            await service.look()
        self.settings = StoreSettings(url="s3://others")
        await service.look()
        return self.logged

    async def object(self) -> Node:
        if self.away:
            self.away -= 1
            raise StoreUnreachable("s3://images: no answer")
        return self

    async def lacks(self) -> list[str]:
        self.probes += 1
        return self.lacks_

    def warning(self, event: str, **fields: Any) -> None:
        self.logged.append({"event": event, **fields})


def entry(store: str) -> dict[str, Any]:
    return {"event": "store.probed", "store": store, "lacks": [VERSIONS]}


@pytest.mark.parametrize("away", [0, 2])
def test_store_is_tried_once_and_again_after_a_change(away: int) -> None:
    node = Node([VERSIONS], away)
    assert node.looks(5) == [entry("s3://images"), entry("s3://others")]
    assert node.probes == 2


def test_service_that_has_all_is_not_mentioned() -> None:
    node = Node([])
    assert node.looks(2) == []
    assert node.probes == 2

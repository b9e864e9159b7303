"""Whose images arrive for containers, when more are wanted than may arrive at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from kybernate.agent.service import fetches
from kybernate.agent.service.fetches import MOST, MOST_WAITING, Fetches
from kybernate.node.failure import Failure
from tests.unit.agent.access.conftest import soon


class Bringing(Fetches):
    """Fetches whose images arrive when the test says so."""

    def __init__(self, place: Path) -> None:
        log = structlog.wrap_logger(structlog.testing.CapturingLogger())
        super().__init__(None, None, None, print, log)  # type: ignore[arg-type]  # nothing is brought
        self.place = place
        self.arriving: dict[tuple[str, str], asyncio.Event] = {}

    async def _bring(self, namespace: str, name: str, fetch: Any) -> None:
        self.arriving[namespace, name] = asyncio.Event()
        fetch.begun.set()
        await self.arriving[namespace, name].wait()
        del self.arriving[namespace, name]

    def _place(self, namespace: str, name: str) -> Path:
        return self.place / namespace / name

    def wanted(self, namespace: str, name: str) -> asyncio.Task[Path]:
        return asyncio.create_task(self.fetch(namespace, name))


def test_four_namespaces_do_not_hold_all_places(tmp_path: Path) -> None:
    async def main() -> None:
        bringing = Bringing(tmp_path)
        greedy = [bringing.wanted(f"n{number}", name) for number in range(4) for name in ("one", "two")]
        await soon(lambda: len(bringing.arriving) == 4 + fetches.MOST_SECOND)
        assert await asyncio.wait_for(bringing.wanted("other", "one"), 5) == tmp_path / "other" / "one"
        for one in [key for key in bringing.arriving if key[1] == "two"]:
            bringing.arriving[one].set()
        await asyncio.wait_for(asyncio.wait(greedy), 5)  # a restore begins when its image has begun to arrive
        await bringing.close()

    asyncio.run(main())


def test_namespaces_wait_for_a_place_in_turn(tmp_path: Path) -> None:
    async def main() -> None:
        bringing = Bringing(tmp_path)
        tasks = [bringing.wanted(f"n{number}", "one") for number in range(MOST + MOST_WAITING)]
        await soon(lambda: len(bringing.arriving) == MOST)
        with pytest.raises(Failure, match="arrive already"):
            await bringing.fetch("late", "one")
        with pytest.raises(Failure, match="arrive already"):
            await asyncio.gather(*(bringing.fetch("n0", name) for name in ("two", "three")))
        bringing.arriving["n0", "one"].set()
        await soon(lambda: (f"n{MOST}", "one") in bringing.arriving)
        await bringing.close()
        for task in tasks:
            task.cancel()

    asyncio.run(main())

"""A shim whose checkpoint can be held at a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.task.cancel.cancelling import Shim, Tell


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Run a story about the container's shim."""

    def run(story: Callable[[Shim], Awaitable[Any]]) -> None:
        async def within() -> None:
            shim = Shim(tmp_path, monkeypatch)
            async with asyncio.timeout(30):
                await story(shim)

        asyncio.run(within())

    return run

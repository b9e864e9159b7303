"""The arena's copies, as the pretended driver counts them, and waiting for what another process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

COPY = "cuMemcpyDtoHAsync_v2"
HASHES = 2  # copies by which hashes are read before


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.01)

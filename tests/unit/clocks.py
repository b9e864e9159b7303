"""Time that passes when a test says so."""

from __future__ import annotations

import asyncio


async def pass_time(seconds: float) -> None:
    """Set the running event loop's clock ahead, and return when the timers have fired that are due by then."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    fired = loop.create_future()
    loop.call_later(0, fired.set_result, None)  # behind those that were due before
    await fired

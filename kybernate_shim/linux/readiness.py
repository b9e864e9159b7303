"""Waits on the event loop for descriptors that no transport owns."""

from __future__ import annotations

import asyncio


async def until_readable(*fds: int) -> None:
    """Return when reading one of `fds` would not block: bytes, the end, or an error are there."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    for fd in fds:
        loop.add_reader(fd, _resolve, ready)
    try:
        await ready
    finally:
        for fd in fds:
            loop.remove_reader(fd)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

"""What a model's program is asked before it counts: whether it works, and a request that warms it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from kybernate.node.failure import Unavailable
from kybernate.up.models_file import Entry

FIRST_PAUSE: Final = 0.01  # between two questions to a program that loads
LONGEST_PAUSE: Final = 0.1
ANSWER_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0  # between two looks whether it still runs
WARM_UP_SECONDS: Final = 600.0
SHOWN_BYTES: Final = 500  # of an answer that is no success


async def until_healthy(session: ClientSession, entry: Entry, host: str, runs: Callable[[], Awaitable[bool]]) -> bool:
    """Return True when a program answers its health check, False when it has ended. Raises Unavailable."""
    end, looked, pause = time.monotonic() + entry.start_timeout, time.monotonic(), FIRST_PAUSE
    url = f"http://{host}:{entry.port}{entry.health}"
    while time.monotonic() < end:
        try:
            async with session.get(url, timeout=ClientTimeout(total=ANSWER_SECONDS)) as answer:
                if answer.status < 300:
                    return True
        except (ClientError, TimeoutError):
            pass
        if time.monotonic() - looked > LOOK_SECONDS:
            if not await runs():
                return False  # the next look says with which status
            looked = time.monotonic()
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    raise Unavailable(
        f"{url} was not answered with success for {entry.start_timeout:.0f} s",
        state="the program still runs",
        advice="look at `kybernate logs`; `health` and `start-timeout` of the model may be wrong",
    )


async def warm_up(session: ClientSession, entry: Entry, host: str) -> None:
    """Send a model its first request. Raises Unavailable."""
    assert entry.warm_up is not None
    url = f"http://{host}:{entry.port}{entry.warm_up.path}"
    headers = {"Content-Type": "application/json"}
    try:
        limit = ClientTimeout(total=WARM_UP_SECONDS)
        async with session.post(url, data=entry.warm_up.body, headers=headers, timeout=limit) as answer:
            if answer.status >= 300:
                text = (await answer.content.read(SHOWN_BYTES)).decode(errors="replace")
                raise Unavailable(f"{url} answered {answer.status}: {text}", state="the program keeps running")
    except (ClientError, TimeoutError) as error:
        raise Unavailable(f"{url} did not answer: {error}", state="the program keeps running") from error

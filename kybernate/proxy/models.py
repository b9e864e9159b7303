"""What the proxy asks of the world: the state of each model, pushed; a wake; a suspend; and whether a port accepts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from kybernate.node.failure import Failure
from kybernate.proxy.holding import Phase
from kybernate.proxy.settings import Model

FIRST_PAUSE: Final = 0.002
LONGEST_PAUSE: Final = 0.25
CONNECT_SECONDS: Final = 5.0  # longer than any network that still works; the pause between tries is another thing


class WakeFailed(Failure):
    """A model did not wake. It is as it was; `absent`: there is no container, and nothing that it could be made of."""

    def __init__(self, message: str, *, absent: bool = False, state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.absent = absent


class SuspendFailed(Failure):
    """A model could not be suspended, or is `used`: by another proxy, or by its own work on a GPU. It works on."""

    def __init__(self, message: str, *, used: bool = False, state: str = "", advice: str = "") -> None:
        super().__init__(message, state=state, advice=advice)
        self.used = used


class Models(Protocol):
    """Where models live. One implementation asks the node's agent, one is the tests'."""

    def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        """Yield the phase of each model, by its name, now and whenever it changes; without an end."""
        ...

    async def wake(self, model: Model) -> None:
        """Return once its processes compute. Raises WakeFailed."""
        ...

    async def suspend(self, model: Model, *, unless_used: bool) -> None:
        """Return once its GPU is free; with `unless_used`, only where nothing shows that it is used.

        Raises SuspendFailed.
        """
        ...

    async def report(self, model: Model, in_flight: int) -> bool:
        """Say how many requests a model has from here; return whether it was used by anything else since the last time.

        Raises Failure.
        """
        ...


def place_of(upstream: str) -> tuple[str, int]:
    """Return host and port of an address."""
    parts = urlsplit(upstream)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


async def port_accepts(upstream: str) -> None:
    """Return once a connection to `upstream` is accepted, however long that takes; the caller has the deadline.

    The port of a program that was suspended accepts immediately, that of one that starts some time later: the pause
    between two tries begins with 2 ms and doubles. It has nothing to do with how long one try may take.
    """
    host, port = place_of(upstream)
    pause = FIRST_PAUSE
    while True:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            writer.close()
            return


@dataclass
class Tried:
    """A port that did not accept, and how many requests wait until it does."""

    task: asyncio.Task[None]
    waiting: int = 0


class Ports:
    """Ports that did not accept. One task tries each, or a thousand requests would be as many connections each time."""

    def __init__(self) -> None:
        self._tried: dict[str, Tried] = {}

    async def accepts(self, upstream: str) -> None:
        """Return once a connection is accepted, as `port_accepts`."""
        one = self._tried.get(upstream)
        if one is None or one.task.done():
            one = self._tried[upstream] = Tried(asyncio.ensure_future(port_accepts(upstream)))
        one.waiting += 1
        try:
            await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting:
                one.task.cancel()
                if self._tried.get(upstream) is one:
                    del self._tried[upstream]

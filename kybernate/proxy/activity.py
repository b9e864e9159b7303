"""Reports what models have in flight, so that nothing suspends one in the middle of a stream, and hears of other use.

A report ends by itself after some seconds, so it is repeated; the first request of a model and the end of its last one
are reported when they happen.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kybernate.node.failure import Failure
from kybernate.proxy.engine import Engine
from kybernate.proxy.holding import Held, Phase
from kybernate.proxy.models import Models
from kybernate_shim.logs import Log

EVERY_SECONDS: Final = 5.0
APART_SECONDS: Final = 0.25  # between two rounds: a model that is called now and then is no load for the agent
AT_WORK: Final = frozenset({Phase.AWAKE, Phase.DRAINING})


class Activity:
    """Reports while `run` runs. What a model has is `in_flight_of`: HAProxy passes this process' requests as well."""

    def __init__(self, engine: Engine, source: Models, log: Log) -> None:
        self._engine, self._source, self._log = engine, source, log
        self._busy: dict[str, bool] = {}  # as it was reported
        self._due: set[str] = set()
        self._changed = asyncio.Event()
        engine.listeners.append(self._noticed)

    async def run(self) -> None:
        """Report until this is cancelled."""
        loop = asyncio.get_running_loop()
        every = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(every):
                    await self._changed.wait()
            except TimeoutError:
                every = loop.time() + EVERY_SECONDS
                self._due |= {name for name, held in self._engine.held.items() if self._is_reported(held)}
            self._changed.clear()
            due, self._due = self._due, set()
            await asyncio.gather(*(self._report(self._engine.held[name]) for name in due))
            await asyncio.sleep(APART_SECONDS)

    def _is_reported(self, held: Held) -> bool:
        """Return whether the agent is told of a model again: what it has, and whether something else uses it."""
        return bool(held.model.container) and (held.phase in AT_WORK or in_flight_of(held) > 0)

    def _noticed(self, held: Held) -> None:
        name = held.model.name
        if held.model.container and (in_flight_of(held) > 0) != self._busy.get(name, False):
            self._due.add(name)
            self._changed.set()

    async def _report(self, held: Held) -> None:
        name, count = held.model.name, in_flight_of(held)
        self._busy[name] = count > 0
        try:
            used = await self._source.report(held.model, count)
        except Failure as error:
            self._log.debug("activity.not_reported", model=name, error=str(error))
            return
        if used:
            self._engine.used(name)


def in_flight_of(held: Held) -> int:
    """Return how many requests, streams and connections a model has, in both data planes."""
    return max(held.in_flight, held.elsewhere)

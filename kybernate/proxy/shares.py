"""This proxy's share of what each model may have in flight, where several proxies are before one agent.

The agent divides a model's `concurrency` among them, and says each change. A proxy keeps to a share that was lowered as
soon as it has read it: what is in flight ends, and the agent is told, so that another one gets the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.proxy.engine import Engine
from kybernate.proxy.holding import Held, Phase
from kybernate_shim.logs import Log

LASTS_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 3.0
APART_SECONDS: Final = 0.002  # between two rounds of requests: what comes together is asked for together
AGAIN_SECONDS: Final = 0.25  # after a connection that ended
ASKING: Final = frozenset({Phase.AWAKE, Phase.DRAINING})


class Sharing(Protocol):
    """The agent's side."""

    def share(self, requests: AsyncIterator[wire.ConcurrencyRequest]) -> AsyncIterator[wire.ConcurrencyShare]:
        """Send requests and yield answers, until the connection ends. Raises Failure."""
        ...


@dataclass
class Known:
    """What the agent knows of a model from here, and has said: requests at one time.

    `held` is what it was told, or the largest share since then.
    """

    wanted: int = 0
    held: int = 0
    granted: int = 0
    seen: int = 0  # number of the last answer on this connection
    holders: int = 2  # until the agent says that there is no other
    answered: float = 0.0


def asked(state: Held, known: Known) -> tuple[int, int]:
    """Return what to say to the agent now: how many a model wants here, and how many it keeps.

    One that wants nothing keeps its share while no other proxy has one: so the next request need not ask.
    """
    wanted = max(state.in_flight, state.elsewhere) + len(state.waiting)
    if not wanted and known.holders < 2 and state.phase in ASKING:
        wanted = 1
    told = state.limited in (None, known.granted)  # the other plane keeps to it, and was asked afterwards
    kept = max(known.granted, min(max(state.in_flight, state.running), known.held) if told else known.held)
    return min(wanted, state.model.concurrency), kept


def is_due(state: Held, known: Known) -> bool:
    """Return whether the agent is to be told before the share is renewed."""
    wanted, kept = asked(state, known)
    needs = wanted > known.granted and wanted > known.wanted
    gives = kept < known.held or (wanted == 0 < known.wanted)
    return needs or gives


class Shares:
    """Asks while `run` runs. `name` is this proxy's, for the agent. Models without `concurrency` have no shares."""

    def __init__(self, engine: Engine, sharing: Sharing, name: str, log: Log) -> None:
        self._engine, self._sharing, self._name, self._log = engine, sharing, name, log
        self._known = {
            name: Known() for name, held in engine.held.items() if held.model.container and held.model.concurrency
        }
        self._names = {
            (one.container, one.namespace): name for name, one in ((n, engine.held[n].model) for n in self._known)
        }
        self._due: set[str] = set()
        self._changed = asyncio.Event()
        for name in self._known:
            engine.grant(name, 0)
        engine.listeners.append(self._noticed)

    async def run(self) -> None:
        """Keep shares until this is cancelled."""
        if not self._known:
            return
        while True:
            try:
                async for share in self._sharing.share(self._requests()):
                    self._take(share)
            except Failure as error:
                self._log.debug("shares.not_kept", error=str(error))
            self._let_end()
            await asyncio.sleep(AGAIN_SECONDS)

    def _noticed(self, held: Held) -> None:
        name = held.model.name
        if (known := self._known.get(name)) is not None and is_due(held, known):
            self._due.add(name)
            self._changed.set()

    async def _requests(self) -> AsyncIterator[wire.ConcurrencyRequest]:
        """Yield what to say on one connection: first all that is kept, then changes and renewals."""
        loop = asyncio.get_running_loop()
        renew = loop.time()
        for known in self._known.values():
            known.seen = 0
        while True:
            try:
                async with asyncio.timeout_at(renew):
                    await self._changed.wait()
            except TimeoutError:
                renew = loop.time() + RENEW_SECONDS
                self._due |= self._known.keys()  # those that want nothing, too: others know so that they are not alone
            self._changed.clear()
            due, self._due = self._due, set()
            for name in due:
                yield self._request(name)
            await asyncio.sleep(APART_SECONDS)

    def _request(self, name: str) -> wire.ConcurrencyRequest:
        held, known = self._engine.held[name], self._known[name]
        known.wanted, known.held = asked(held, known)
        request = wire.ConcurrencyRequest(
            container=held.model.container, namespace=held.model.namespace, holder=self._name,
            limit=held.model.concurrency, wanted=known.wanted, held=known.held, seen=known.seen,
        )  # fmt: skip
        request.lasts.FromNanoseconds(round(LASTS_SECONDS * 1e9))
        return request

    def _take(self, share: wire.ConcurrencyShare) -> None:
        name = self._names.get((share.container, share.namespace), "")
        if (known := self._known.get(name)) is None:
            return
        lowered = share.granted < known.granted
        known.held = max(known.held, share.granted)
        known.granted, known.holders, known.seen = share.granted, max(1, share.holders), share.number
        known.answered = asyncio.get_running_loop().time()
        self._engine.grant(name, share.granted)
        if lowered or is_due(self._engine.held[name], known):
            self._due.add(name)
            self._changed.set()

    def _let_end(self) -> None:
        """Without the agent, a share that others may have by now has ended; one without others is kept."""
        now = asyncio.get_running_loop().time()
        for name, known in self._known.items():
            if known.granted and known.holders > 1 and now - known.answered > LASTS_SECONDS:
                known.granted = 0
                self._engine.grant(name, 0)

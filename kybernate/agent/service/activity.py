"""The service of activity: what a proxy knows of the use of containers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from kybernate.agent.access.caller import CALLER
from kybernate.agent.inventory.activity import LONGEST_NAME
from kybernate.agent.inventory.containers import Key
from kybernate.agent.inventory.inventory import EXPIRE_SECONDS, Inventory
from kybernate.agent.inventory.shares import MOST_CONTAINERS, Holding, Shares
from kybernate.messages import agent_pb2 as wire
from kybernate.messages.agent_pb2_grpc import ActivityServicer
from kybernate.node.failure import Exhausted, Failure, Invalid

Answers = asyncio.Queue[wire.ConcurrencyShare | None | Failure]


def name_of(given: str) -> str:
    """Return the name of the calling program: who called, and what it calls itself. Raises Invalid."""
    if len(given) > LONGEST_NAME or not (given.isprintable() or not given):
        raise Invalid(f"a name has up to {LONGEST_NAME} printable characters", state="nothing was noted")
    return f"{CALLER.get().key} {given}" if given else CALLER.get().key


class Activity(ActivityServicer):
    """Notes reports in the inventory, and shares what containers may have in flight."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._listeners: set[Callable[[str, str, Holding], None]] = set()
        self._streams: set[Answers] = set()
        self._shares = Shares(self._changed, time.monotonic)

    def close(self) -> None:
        """End the calls that would last."""
        for answers in self._streams:
            answers.put_nowait(None)

    async def ReportActivity(self, request: wire.ReportActivityRequest, context: Any) -> wire.ReportActivityResponse:
        keys = self._keys(request)
        seconds = request.lasts.ToTimedelta().total_seconds()
        if seconds < 0:
            raise Invalid("lasts is negative", state="nothing was noted")
        self._inventory.reports.report(name_of(request.reporter), keys, request.in_flight, seconds)
        marks = [(await self._inventory.activity(key)).mark for key in keys]
        in_flight = sum(self._inventory.reports.of(key).in_flight for key in keys)
        return wire.ReportActivityResponse(containers=len(keys), in_flight=in_flight, mark=sum(marks))

    async def ShareConcurrency(
        self, requests: AsyncIterator[wire.ConcurrencyRequest], context: Any
    ) -> AsyncIterator[wire.ConcurrencyShare]:
        """Answer each request, and say each change that others cause, until the client ends the call."""
        named: dict[str, wire.ConcurrencyShare] = {}  # by subject and holder: what the client calls it
        answers: Answers = asyncio.Queue()

        def changed(subject: str, holder: str, found: Holding) -> None:
            if (name := named.get(f"{holder} {subject}")) is not None:
                answers.put_nowait(_share(name, found, self._shares.holders(subject)))

        async def take() -> None:
            try:
                async for request in requests:
                    answers.put_nowait(self._asked(request, named))
                answers.put_nowait(None)
            except Failure as error:
                answers.put_nowait(error)

        self._listeners.add(changed)
        self._streams.add(answers)
        taking = asyncio.create_task(take())
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, Failure):
                    raise answer
                yield answer
        finally:
            self._listeners.discard(changed)
            self._streams.discard(answers)
            taking.cancel()

    def _asked(
        self, request: wire.ConcurrencyRequest, named: dict[str, wire.ConcurrencyShare]
    ) -> wire.ConcurrencyShare:
        seconds = request.lasts.ToTimedelta().total_seconds()
        if not request.container or not request.limit or seconds < 0:
            raise Invalid("a share needs a container and a limit", state="nothing was granted")
        holder, subject = name_of(request.holder), self._subject(request)
        known = named.setdefault(
            f"{holder} {subject}", wire.ConcurrencyShare(container=request.container, namespace=request.namespace)
        )
        if len(named) > MOST_CONTAINERS:
            raise Exhausted("one connection has too many shares", state="nothing was granted")
        found = self._shares.ask(
            subject, holder, limit=request.limit, wanted=request.wanted, held=request.held, seconds=seconds,
            seen=request.seen,
        )  # fmt: skip
        return _share(known, found, self._shares.holders(subject))

    def _subject(self, request: wire.ConcurrencyRequest) -> str:
        """Return the container that a share is of; one that is not there has the name that it was given."""
        try:
            found = self._inventory.find(request.container, request.namespace)
        except Failure:
            return f"{request.namespace[:LONGEST_NAME]} {request.container[:LONGEST_NAME]}"
        return f"{found.namespace}/{found.id}"

    async def expire(self) -> None:
        """Let shares end, until this is cancelled."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            self._shares.expire()

    def _changed(self, subject: str, holder: str, found: Holding) -> None:
        for listener in list(self._listeners):
            listener(subject, holder, found)

    def _keys(self, request: wire.ReportActivityRequest) -> list[Key]:
        """Return the containers that a report is about. Raises Missing, Ambiguous, Invalid."""
        match request.WhichOneof("of"):
            case "container":
                found = self._inventory.find(request.container, request.namespace)
                return [(found.namespace, found.id)]
            case "workload":
                live = (one for one in self._inventory.list() if not one.sandbox)
                return [
                    (one.namespace, one.id) for one in live if f"{one.pod_namespace}/{one.workload}" == request.workload
                ]
        raise Invalid("neither container nor workload is given", state="nothing was noted")


def _share(named: wire.ConcurrencyShare, found: Holding, holders: int) -> wire.ConcurrencyShare:
    return wire.ConcurrencyShare(
        container=named.container,
        namespace=named.namespace,
        granted=found.granted,
        holders=holders,
        number=found.number,
    )

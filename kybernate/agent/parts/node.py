"""What is recorded and what is known of the node: the journal, the events, containerd and the inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from kybernate.agent.access.caller import OwnContainer
from kybernate.agent.events.containerd import ContainerdSink
from kybernate.agent.events.cursors import SCHEMA as HOOKS
from kybernate.agent.events.cursors import Cursors
from kybernate.agent.events.log import EventLog, Sink
from kybernate.agent.events.store import SCHEMA as EVENTS
from kybernate.agent.events.store import EventStore
from kybernate.agent.events.webhooks import Webhooks
from kybernate.agent.inventory.inventory import Inventory
from kybernate.agent.journal import Journal
from kybernate.agent.keeping.uses import SCHEMA as USES
from kybernate.agent.kubernetes.requests import SCHEMA as REQUESTS
from kybernate.agent.kubernetes.spoken import SCHEMA as SPOKEN
from kybernate.agent.lifetime import Watchdog
from kybernate.agent.live import hooks_of
from kybernate.agent.operations.store import SCHEMA as OPERATIONS
from kybernate.agent.part import Part, Work
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd_async import AsyncContainerd
from kybernate.node.failure import Failure

if TYPE_CHECKING:
    from kybernate.agent.assembly import Agent
    from kybernate.agent.settings import Settings

LOOP_SECONDS: Final = 5.0  # that a thread waits for the event loop


class Records(Part):
    """The journal, with the tables of all that keep something in it, and the watchdog that tests it."""

    journal: Journal

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def start(self) -> None:
        """Raises JournalUnusable."""
        path = self._agent.settings().state_directory / "journal.db"
        self.journal = Journal(path, (*OPERATIONS, *EVENTS, *HOOKS, *USES, *REQUESTS, *SPOKEN))
        self.closing.callback(self.journal.close)

    def work(self) -> Iterable[Work]:
        yield Watchdog(self._agent.notifier, self.journal, self._agent.log).run()


class Events(Part):
    """The hub, the log of events, and where events go: webhooks, containerd, and the parts that `hear` them."""

    store: EventStore
    hub: Hub
    log: EventLog

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent
        self._sinks: list[Sink] = []

    async def start(self) -> None:
        """Raises Failure."""
        agent = self._agent
        settings, journal = agent.settings(), agent.records.journal
        self.containerd = await self.closing.enter_async_context(AsyncContainerd(str(settings.containerd)))
        self.store = EventStore(journal)
        self.hub = Hub(self.store)
        self._webhooks = Webhooks(self.store, Cursors(journal), agent.name, agent.log)
        self.closing.push_async_callback(self._webhooks.close)
        self._sink = ContainerdSink(self.containerd, agent.log)
        self._sinks += [self.hub.put, self._webhooks.wake, self._sink.offer]
        self.log = EventLog(self.store, self._sinks, agent.log)
        self.closing.push_async_callback(self.log.close)
        await self._webhooks.configure(hooks_of(settings.webhooks))

    def work(self) -> Iterable[Work]:
        yield self._sink.run()

    def hear(self, sink: Sink) -> None:
        """Give each event from now on to `sink`, which neither blocks nor raises."""
        self._sinks.append(sink)

    async def reload(self, before: Settings) -> None:
        now = self._agent.settings().webhooks
        if now == before.webhooks and not now.key:
            return
        try:
            await self._webhooks.configure(hooks_of(now))
        except Failure as error:
            self._agent.not_applied(error)


class Known(Part):
    """The inventory: containers, GPUs, tiers and facts of the node."""

    inventory: Inventory

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def start(self) -> None:
        agent, events = self._agent, self._agent.events
        self.inventory = Inventory(
            events.containerd, events.hub, cast(Any, events.log.note), agent.log, name=agent.name, config=agent.config
        )

    def work(self) -> Iterable[Work]:
        yield self.inventory.run()

    def of_our_shims(self) -> list[wire.Container]:
        """Return the containers with a task of Kybernate's shims."""
        found = self._agent.events.hub.objects("container")
        return [one for one in found if one.state != wire.Container.NO_TASK and not one.foreign]

    def find(self, own: OwnContainer) -> wire.Container | None:
        """Return a container as it is known now."""
        found: wire.Container | None = self._agent.events.hub.get("container", f"{own.namespace}/{own.id}")
        return found

    def gpus_of(self, id: str) -> Sequence[str]:
        """Return the GPUs of a container. For threads: the hub is the event loop's.

        None for one with a seat: what is copied on its GPUs at the same time is the decision of the seats' arbiter, and
        no operation waits for its turn before that.
        """

        async def look() -> Sequence[str]:
            claims = self.inventory.containers.claims()
            found = (one for one in self._agent.events.hub.objects("container") if one.id == id)
            return next((tuple(one.gpu_uuids) for one in found if (one.namespace, one.id) not in claims), ())

        return asyncio.run_coroutine_threadsafe(look(), self._agent.loop).result(LOOP_SECONDS)

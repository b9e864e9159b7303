"""The agent's part in its cluster: what happens on the node appears on pods, and pods' annotations are acted on."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from kybernate.agent.journal import JournalUnusable
from kybernate.agent.kubernetes.access import Access
from kybernate.agent.kubernetes.acting import Acting
from kybernate.agent.kubernetes.api import Api
from kybernate.agent.kubernetes.pods import Pods
from kybernate.agent.kubernetes.requests import Requests
from kybernate.agent.kubernetes.series import KEEP_SECONDS
from kybernate.agent.kubernetes.speaker import Speaker
from kybernate.agent.kubernetes.spoken import Spoken
from kybernate.agent.kubernetes.story import Subject, parked
from kybernate.agent.service.quota import Quota
from kybernate.messages import agent_pb2 as wire

if TYPE_CHECKING:
    from kybernate.agent.events.store import EventStore
    from kybernate.agent.inventory.containers import Containers
    from kybernate.agent.journal import Journal
    from kybernate.agent.operations.engine import Engine
    from kybernate.agent.settings import Kubernetes
    from kybernate.agent.watch.hub import Hub
    from kybernate.node.lookup import KnownContainer
    from kybernate_shim.config import Config
    from kybernate_shim.logs import Log

BEGUN: Final = ("container.created", "container.started", "shim.found")  # what annotations ask for can begin now
REMEMBERED: Final = 1024  # containers: those that are gone, and those that are not known yet
MOST_EARLY: Final = 8  # events of a container that is not known yet


class Cluster:
    """`offer` is a sink of the log of events; `parts` is work that lasts as long as the agent."""

    def __init__(
        self,
        access: Access,
        node: str,
        engine: Engine,
        journal: Journal,
        events: EventStore,
        containers: Containers,
        hub: Hub,
        config: Callable[[], Config],
        settings: Callable[[], Kubernetes],
        log: Log,
    ) -> None:
        self._events, self._containers, self._hub, self._log = events, containers, hub, log
        self._spoken = Spoken(journal)
        self._apis = Api(access), Api(access)  # that of the watch lasts, and must not end with a failed call
        self._pods = Pods(self._apis[0], node, log, lambda pod: self._acting.changed(pod), lambda: self._acting.gone())
        self._speaker = Speaker(
            self._apis[1], node, self._subject, self._pods.field_of, log, settled=self._spoken.advance
        )
        self._acting = Acting(
            engine,
            Requests(journal),
            containers.known,
            self._find,
            config,
            self._speaker.say,
            self._pods.get,
            lambda: {pod.uid for pod in self._pods.current.values()},
            lambda: settings().checkpoints,
            Quota(lambda: settings().quota, "kubernetes.quota"),
            log,
        )
        self._subjects: OrderedDict[tuple[str, str], Subject | None] = OrderedDict()
        self._early: OrderedDict[tuple[str, str], list[wire.Event]] = OrderedDict()

    def parts(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what has to be done while the agent runs."""
        return self._speak(), self._pods.run(), self._act()

    def probes(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return what a pod's object says of its probes, None where the pod is not known."""
        return self._pods.probes.get((namespace, name))

    def priority(self, namespace: str, name: str) -> int | None:
        """Return the priority of a pod's class, None where the pod is not known."""
        pod = self._pods.get(namespace, name)
        return pod.priority if pod is not None else None

    def annotation(self, namespace: str, name: str, key: str) -> str:
        """Return the value of a pod's annotation of ours, "" where it has none or is not known."""
        pod = self._pods.get(namespace, name)
        return dict(pod.annotations).get(key, "") if pod is not None else ""

    def offer(self, event: wire.Event) -> None:
        """Take an event; never blocks. One of a container that the inventory has not seen yet waits until it has."""
        key = event.namespace, event.container
        if not event.container:
            return
        self._subject(*key)
        if key not in self._subjects:
            early = self._early.setdefault(key, [])
            early[MOST_EARLY - 1 :] = [event]
            if len(self._early) > REMEMBERED:
                self._early.popitem(last=False)
            return
        for one in [*self._early.pop(key, ()), event]:
            self._speaker.offer(one)
        self._follow(self._subjects[key], event)

    async def _speak(self) -> None:
        """Write events, and those first that happened in the last hour and that the last run has not written."""
        await self._containers.ready.wait()
        began = self._events.began
        try:
            after = await self._spoken.begin(began)
            while page := await self._events.between(after, began):
                for event in page:
                    if time.time() - event.time.ToNanoseconds() / 1e9 < KEEP_SECONDS:
                        self.offer(event)
                after = page[-1].id
        except JournalUnusable as error:
            state = "earlier events do not appear on pods"
            self._log.warning("kubernetes.events_not_loaded", error=str(error), state=state)
        await self._speaker.run()

    async def _act(self) -> None:
        """Look at pods once the node's containers are known: those that run already begin no more."""
        await self._containers.ready.wait()
        await self._acting.run()

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(api.close() for api in self._apis))

    def _follow(self, subject: Subject | None, event: wire.Event) -> None:
        if subject is None:
            return
        if event.type in BEGUN:
            self._acting.touch(subject.namespace, subject.pod)
        operation: wire.Operation | None = self._hub.get("operation", event.operation) if event.operation else None
        if operation is not None and (what := parked(operation)) is not None and event.type == "operation.succeeded":
            self._speaker.say(subject, what, event)

    def _subject(self, namespace: str, id: str) -> Subject | None:
        """Return the pod that an event of a container is about; one that is gone is remembered for a while."""
        record = self._containers.record(namespace, id)
        if record is not None:
            self._subjects[namespace, id] = (
                Subject(record.pod_namespace, record.pod, record.pod_uid, record.name)
                if record.pod_uid and not record.sandbox
                else None
            )
            self._subjects.move_to_end((namespace, id))
            if len(self._subjects) > REMEMBERED:
                self._subjects.popitem(last=False)
        return self._subjects.get((namespace, id))

    def _find(self, container: KnownContainer) -> wire.Container | None:
        found: wire.Container | None = self._hub.get("container", f"{container.namespace}/{container.id}")
        return found

"""The models of a node, by its agent: their states from its Watch, wakes and suspends as its operations."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Final

from kybernate.client.asynchronous import AsyncAgent
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import SuspendFailed, WakeFailed
from kybernate.proxy.settings import Model

KINDS: Final = ("container",)
PHASES: Final = {  # by the state of its GPU memory; in all others its processes compute, or will without a wake
    "suspending": Phase.SUSPENDING,
    "suspended": Phase.ASLEEP,
    "partly suspended": Phase.ASLEEP,
    "stuck": Phase.ASLEEP,
    "resuming": Phase.WAKING,
}


class AgentModels:
    """Models whose containers an agent knows. A restart of the agent is waited for."""

    def __init__(self, agent: AsyncAgent, models: Iterable[Model]) -> None:
        self._agent = agent
        self._models = [one for one in models if one.container]
        self._containers: dict[str, wire.Container] = {}  # by id
        self._phases: dict[str, Phase] = {}
        self._changed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        """Yield phases as `Models.watch`, until the agent is lost. Raises AgentUnreachable and AgentRefused."""
        whole = False
        async for change in self._agent.watch(KINDS):
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_BEGIN:
                self._containers, whole = {}, False
            elif change.bookmark == wire.BOOKMARK_SNAPSHOT_END:
                whole = True
            elif change.HasField("container"):
                self._take(change.container, change.removed)
            if whole:
                for name, phase in self._moved():
                    yield name, phase

    async def wake(self, model: Model) -> None:
        """Have its container work; what the Watch says first, or the operation, ends the wait. Raises WakeFailed."""
        if self._phases.get(model.name) == Phase.AWAKE:
            return
        seen = self._changed[model.name]
        seen.clear()
        woken = asyncio.ensure_future(self._work(model))
        noticed = asyncio.ensure_future(seen.wait())
        try:
            await asyncio.wait((woken, noticed), return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                woken.result()
        finally:
            noticed.cancel()
            if not woken.done():
                woken.add_done_callback(_forget)

    async def _work(self, model: Model) -> None:
        try:
            operation = await self._agent.wake(model.container, namespace=model.namespace)
            await operation.result()
        except Failure as error:
            raise WakeFailed(str(error), state=error.state, advice=error.advice) from error

    async def suspend(self, model: Model) -> None:
        """Suspend its container. Raises SuspendFailed."""
        try:
            operation = await self._agent.sleep(model.container, namespace=model.namespace)
            await operation.result()
        except Failure as error:
            raise SuspendFailed(str(error), state=error.state, advice=error.advice) from error
        self._phases[model.name] = Phase.ASLEEP  # which the Watch may say a little later

    def _take(self, container: wire.Container, removed: bool) -> None:
        if removed:
            self._containers.pop(container.id, None)
        elif not container.sandbox:
            self._containers[container.id] = container

    def _moved(self) -> list[tuple[str, Phase]]:
        """Return the models whose phase is another one than when this was last asked."""
        found = []
        for model in self._models:
            phase = phase_of([one for one in self._containers.values() if is_of(one, model)])
            if self._phases.get(model.name) != phase:
                self._phases[model.name] = phase
                found.append((model.name, phase))
                if phase == Phase.AWAKE:
                    self._changed[model.name].set()
        return found


def is_of(container: wire.Container, model: Model) -> bool:
    """Return whether a container is the one that a model names: by its id, its title, or its pod."""
    if model.namespace and container.namespace != model.namespace:
        return False
    names = {container.id, container.title}
    if container.pod:
        names |= {container.pod, f"{container.pod_namespace}/{container.pod}"}
    return model.container in names


def phase_of(containers: list[wire.Container]) -> Phase:
    """Return the phase of a model with these containers: those of the past have stopped, or one is at work."""
    alive = [one for one in containers if one.state in ("running", "paused")]
    if not alive:
        return Phase.ABSENT
    newest = max(alive, key=lambda one: (one.started.seconds, one.started.nanos))
    if newest.state == "paused":
        return Phase.ASLEEP
    return PHASES.get(newest.gpu, Phase.AWAKE)


def _forget(task: asyncio.Future[None]) -> None:
    """Take the result of an operation whose effect was seen before its end."""
    if not task.cancelled():
        task.exception()

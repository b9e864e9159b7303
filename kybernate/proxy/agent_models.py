"""The models of a node, by its agent: their states from its Watch, wakes and suspends as its operations."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Final

from kybernate.client.asynchronous import AsyncAgent
from kybernate.client.errors import AgentRefused, AgentUnreachable
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import SuspendFailed, WakeFailed
from kybernate.proxy.settings import Model

KINDS: Final = ("container",)
LASTS_SECONDS: Final = 15.0  # of a report, three times as long as until the next one
ABSENT: Final = "Missing"  # the agent's name of that fact
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # between two tries to reach an agent that is being started again
ENDING_SECONDS: Final = 0.5  # in which containerd knows of a container that has just ended, and can remove it
PHASES: Final = {  # by the state of its GPU memory; in all others its processes compute, or will without a wake
    wire.Container.SUSPENDING: Phase.SUSPENDING,
    wire.Container.SUSPENDED: Phase.ASLEEP,
    wire.Container.PARKING: Phase.ASLEEP,
    wire.Container.STUCK: Phase.ASLEEP,
    wire.Container.RESUMING: Phase.WAKING,
}


class AgentModels:
    """Models whose containers an agent knows. A restart of the agent is waited for."""

    def __init__(self, agent: AsyncAgent, models: Iterable[Model]) -> None:
        self._agent = agent
        self._models = [one for one in models if one.container]
        self._containers: dict[str, wire.Container] = {}  # by id
        self._phases: dict[str, Phase] = {}
        self._changed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._marks: dict[str, int] = {}
        self.name = f"proxy-{secrets.token_hex(8)}"  # others may have the same user or certificate

    async def watch(self) -> AsyncIterator[tuple[str, Phase]]:
        """Yield phases as `Models.watch`, until the agent is lost. Raises AgentUnreachable and AgentRefused.

        Each snapshot says all of them: one that was said before an agent was lost may not have been heeded, in the
        middle of a work that the agent's end has made fail.
        """
        whole = False
        async for change in self._agent.watch(KINDS):
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_BEGIN:
                self._containers, whole = {}, False
            elif change.bookmark == wire.BOOKMARK_SNAPSHOT_END:
                whole = True
            elif change.HasField("container"):
                self._take(change.container, change.removed)
            if whole:
                for name, phase in self._moved(all=change.bookmark == wire.BOOKMARK_SNAPSHOT_END):
                    yield name, phase

    async def wake(self, model: Model) -> None:
        """Have its container work; what the Watch says first, or the operation, ends the wait. Raises WakeFailed.

        An agent that is away is waited for: the caller has the deadline.
        """
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
            for task in (noticed, woken):  # the operation continues
                task.cancel()
            await asyncio.gather(noticed, woken, return_exceptions=True)

    async def _work(self, model: Model) -> None:
        """Ask the agent; a second time where the container may have ended just now, and is to be made of its image."""
        key, pause, ending = secrets.token_hex(16), FIRST_PAUSE, True
        while True:
            try:
                operation = await self._agent.wake(model.container, namespace=model.namespace, key=key)
                await operation.result()
                return
            except AgentUnreachable:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Failure as error:
                if isinstance(error, AgentRefused) and error.code == "UNAVAILABLE":  # it is stopping, or just beginning
                    await asyncio.sleep(LONGEST_PAUSE)
                    continue
                absent = getattr(error, "type", "") == ABSENT
                if absent and ending:
                    ending, key = False, secrets.token_hex(16)
                    await asyncio.sleep(ENDING_SECONDS)
                    continue
                raise WakeFailed(str(error), absent=absent, state=error.state, advice=error.advice) from error

    async def suspend(self, model: Model, *, unless_used: bool) -> None:
        """Suspend its container; with `unless_used`, only if neither others nor its GPUs show use.

        Raises SuspendFailed. What this proxy has in flight is none of that: it has drained the model before.
        """
        try:
            if await self.report(model, 0) and unless_used:
                raise SuspendFailed("it is used by others, or computes", used=True, state="it works on")
            operation = await self._agent.sleep(model.container, namespace=model.namespace, unless_used=unless_used)
            await operation.result()
        except SuspendFailed:
            raise
        except Failure as error:
            raise SuspendFailed(str(error), state=error.state, advice=error.advice) from error
        self._phases[model.name] = Phase.ASLEEP  # which the Watch may say a little later

    async def report(self, model: Model, in_flight: int) -> bool:
        """Report requests in flight; see `Models.report`."""
        use = await self._agent.use_of(
            model.container, namespace=model.namespace, in_flight=in_flight, lasts=LASTS_SECONDS, reporter=self.name
        )
        mark, self._marks[model.name] = self._marks.get(model.name, use.mark), use.mark
        return use.in_flight > in_flight or use.mark > mark

    def share(self, requests: AsyncIterator[wire.ConcurrencyRequest]) -> AsyncIterator[wire.ConcurrencyShare]:
        """See `Sharing`."""
        return self._agent.share_concurrency(requests)

    def _take(self, container: wire.Container, removed: bool) -> None:
        if removed:
            self._containers.pop(container.id, None)
        elif not container.sandbox:
            self._containers[container.id] = container

    def _moved(self, *, all: bool) -> list[tuple[str, Phase]]:
        """Return the models whose phase is another one than when this was last asked, or `all`."""
        found = []
        for model in self._models:
            phase = phase_of([one for one in self._containers.values() if is_of(one, model)])
            if all or self._phases.get(model.name) != phase:
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
    alive = [one for one in containers if one.state in (wire.Container.RUNNING, wire.Container.PAUSED)]
    if not alive:
        return Phase.ABSENT
    newest = max(alive, key=lambda one: (one.started.seconds, one.started.nanos))
    if newest.state == wire.Container.PAUSED:
        return Phase.ASLEEP
    return PHASES.get(newest.gpu, Phase.AWAKE)

"""Acts on what pods' annotations say: warns of those without effect, and begins the checkpoints that they ask for.

Pods are examined one after the other, when one of them or one of its containers has changed. A request goes through the
agent's operations as any other, so it waits for its turn, is in the journal and is undone or found again like them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kybernate.agent.access.limits import Buckets
from kybernate.agent.journal import JournalUnusable
from kybernate.agent.kubernetes.pods import Pod
from kybernate.agent.kubernetes.requests import Asked, Known, Requests, asked_of, mistakes_of
from kybernate.agent.kubernetes.story import Subject, Told
from kybernate.agent.operations.submission import TOO_MANY_OPERATIONS_ADVICE
from kybernate.agent.service.quota import Quota
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import ContainerdUnreachable
from kybernate.node.failure import Exhausted, Failure, Unavailable
from kybernate.node.lookup import KnownContainer
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.model import Operation, State, Submission
from kybernate_shim.checkpoint.image.locate import namespace_root
from kybernate_shim.errors import Refused
from kybernate_shim.oci.annotations import CHECKPOINT
from kybernate_shim.trust.audit import Audit, Decision, ImageRef, write
from kybernate_shim.trust.requester import Requester

if TYPE_CHECKING:
    from kybernate.agent.operations.engine import Engine
    from kybernate_shim.config import Config
    from kybernate_shim.logs import Log

SCOPE: Final = "kubernetes"  # of the keys of these operations
LATER: Final = (Unavailable, Exhausted, JournalUnusable, ContainerdUnreachable)  # refuse for a while only
RETRY_SECONDS: Final = 10.0
PER_MINUTE: Final = 30  # requests of one namespace
MOST_WARNED: Final = 4096


@dataclass
class Acting:
    """`containers` returns containerd's records; `find` what the inventory has of one; `enabled` as it is now.

    `pod_of` and `uids` are the pods of the node: by namespace and name, and the uids of all.
    """

    engine: Engine
    requests: Requests
    containers: Callable[[], Iterable[KnownContainer]]
    find: Callable[[KnownContainer], wire.Container | None]
    config: Callable[[], Config]
    say: Callable[[Subject, Told], None]
    pod_of: Callable[[str, str], Pod | None]
    uids: Callable[[], set[str]]
    enabled: Callable[[], bool]
    quota: Quota
    log: Log
    _queue: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _warned: OrderedDict[tuple[str, Told], None] = field(default_factory=OrderedDict)
    _buckets: Buckets = field(default_factory=lambda: Buckets(time.monotonic))
    _asking: set[str] = field(default_factory=set)  # uids of pods of which the journal has requests
    _gone: bool = False
    idle: bool = True  # nothing is being examined

    def changed(self, pod: Pod) -> None:
        """Examine a pod soon; never blocks."""
        self.touch(pod.namespace, pod.name)

    def gone(self) -> None:
        """Forget what pods have asked for that are gone; never blocks."""
        self._gone = True
        self._news.set()

    def touch(self, namespace: str, pod: str) -> None:
        """Examine a pod soon, if it is one of the API server's; never blocks."""
        self._queue[namespace, pod] = None
        self._news.set()

    async def run(self) -> None:
        """Examine pods until cancelled. What cannot be done now is tried again; other pods do not wait for it."""
        await self.engine.ready()
        later = asyncio.get_running_loop().call_later
        while True:
            try:
                if self._gone:
                    await self.requests.keep(self.uids())
                    self._asking = await self.requests.pods()
                    self._gone = False
            except JournalUnusable as error:
                self.log.warning("kubernetes.request_delayed", error=str(error))
            while self._queue:
                self.idle = False
                key, _ = self._queue.popitem(last=False)
                try:
                    if (pod := self.pod_of(*key)) is not None:
                        await self._examine(pod)
                except LATER as error:
                    self.log.warning("kubernetes.request_delayed", pod="/".join(key), error=str(error))
                    later(RETRY_SECONDS, self.touch, *key)
            self.idle = True
            await self._news.wait()
            self._news.clear()

    async def _examine(self, pod: Pod) -> None:
        if not pod.annotations and pod.uid not in self._asking:
            return
        own = [one for one in self.containers() if one.pod_uid == pod.uid and not one.sandbox]
        self._warn(pod, own)
        if self.enabled():
            await self._act(pod, own)

    def _warn(self, pod: Pod, own: Iterable[KnownContainer]) -> None:
        found = [one for one in map(self.find, own) if one is not None and not one.problem]
        seen = [one for one in found if one.state != wire.Container.NO_TASK]
        foreign = bool(seen) and all(one.foreign for one in seen)
        config = self.config()
        counts = {key for key, _ in pod.annotations if config.pod_may_use(key)}
        for what in mistakes_of(pod, foreign=foreign, counts=counts):
            if (pod.uid, what) not in self._warned:
                self.say(pod.subject(), what)
                self._warned[pod.uid, what] = None
                if len(self._warned) > MOST_WARNED:
                    self._warned.popitem(last=False)

    async def _act(self, pod: Pod, own: Iterable[KnownContainer]) -> None:
        """Begin what is asked for and not handled. Raises LATER."""
        asked = list(asked_of(pod))
        known = {one.asked: one for one in await self.requests.of(pod.uid)}
        for former in known.values():
            if former.asked not in asked and await self._may_be_repeated(former):
                await self.requests.forget(pod.uid, former.asked)
        for one in asked:
            if one in known and known[one].handled:
                continue
            live = [found for found in own if found.name == one.container and found.live]
            if live and not pod.ending and self._is_ours(live[-1]):
                request = known.get(one) or await self.requests.add(pod.uid, one)
                self._asking.add(pod.uid)
                await self._begin(pod, live[-1], request)

    def _is_ours(self, container: KnownContainer) -> bool:
        found = self.find(container)
        return found is not None and not found.foreign

    async def _may_be_repeated(self, known: Known) -> bool:
        """Return whether nothing has come of a request whose annotation is gone."""
        if not known.operation:
            return True
        try:
            return (await self.engine.get(known.operation)).state in (State.FAILED, State.CANCELLED)
        except Failure:
            return False  # the journal has it no more: it was long ago, and may have succeeded

    async def _begin(self, pod: Pod, container: KnownContainer, known: Known) -> None:
        """Submit a request. What is refused for good is said on the pod. Raises LATER."""
        asked = known.asked
        try:
            operation = await self._submit(pod, container, known)
        except LATER:
            raise
        except Failure as error:
            await self.requests.settle(pod.uid, known)
            why = str(error).replace(f"{self.config().checkpoint_root}/{pod.namespace}/", "")
            words = "; ".join(filter(None, (f"No image {asked.name} is written: {why}", error.advice)))
            self.say(pod.subject(asked.container), Told("CheckpointRefused", words, warning=True))
            self._audit("refused", pod, container, asked, str(error))
        else:
            await self.requests.settle(pod.uid, known, operation=operation.id)
            self._audit("allowed", pod, container, asked, f"operation {operation.id}")

    async def _submit(self, pod: Pod, container: KnownContainer, known: Known) -> Operation:
        if not self._buckets.take(f"annotations {pod.namespace}", PER_MINUTE):
            raise Exhausted(
                f"pods of namespace {pod.namespace} ask for more than {PER_MINUTE} images a minute",
                advice=TOO_MANY_OPERATIONS_ADVICE,
            )
        await self.quota.require_room(self._directory(pod), "", container.pid)
        return await self.engine.submit(
            Submission(
                Checkpoint(container.id, container.namespace, known.asked.name),
                requester=f"annotation of pod {pod.namespace}/{pod.name}",
                key=known.key,
                scope=SCOPE,
            )
        )

    def _directory(self, pod: Pod) -> Path:
        config = self.config()
        try:
            return namespace_root(config, pod.namespace)
        except Refused as error:
            raise Failure(str(error)) from error

    def _audit(self, decision: Decision, pod: Pod, container: KnownContainer, asked: Asked, reason: str) -> None:
        record = Audit(
            "checkpoint",
            decision,
            requester=Requester("tenant", pod.namespace, pod.name, pod.uid, asked.container),
            task=container.id,
            containerd_namespace=container.namespace,
            image=ImageRef(path=asked.name),
            reason=f"annotation {CHECKPOINT}: {reason}",
            caller=None,
        )
        write(record, self.config(), self.log)

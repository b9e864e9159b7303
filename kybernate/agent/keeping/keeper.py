"""Decides again and again where images belong, and submits what is to be done as operations of the agent.

Nothing here is remembered that could not be found again: after a restart, the next decision sees what there is.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from kybernate.agent.keeping import gather
from kybernate.agent.keeping.parking import PARKED
from kybernate.agent.keeping.uses import Uses
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.store import Wanted
from kybernate.agent.storage.node_tiers import OBJECT, NodeTiers
from kybernate.agent.tier_rules import rules_of
from kybernate.agent.tier_settings import Tiers
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.filesystem import space_of
from kybernate.registry.catalogue import Catalogue, every
from kybernate.registry.model import Filter, ImageRow
from kybernate.store.policy.decide import decide
from kybernate.store.policy.model import Action, Copy, Delete, Evict, Park, Priority, TierState
from kybernate.store.policy.model import State as PolicyState
from kybernate.store.tiers.tier import Ref, Room
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.copy import Copy as CopyImage
from kybernate.verbs.evict import Evict as EvictImage
from kybernate.verbs.model import FINAL, Arguments, State, Submission
from kybernate.verbs.park import Park as ParkContainer

FIRST_SECONDS: Final = 300.0  # between the first two attempts at the same thing
LONGEST_SECONDS: Final = 6 * 3600.0  # between any two
REQUESTER: Final = "policy"
HEALTH_SECONDS: Final = 60.0  # between two looks at whether the object store answers
LOOK_SECONDS: Final = 2.0  # that a decision waits for it; on most services it has answered by then
JUMP_SECONDS: Final = 300.0  # of the wall clock against the monotonic one: then ages are not believed
DISTRUST_SECONDS: Final = 900.0  # for so long
SHARE: Final = 0.05  # of a CPU at most, with however many images
ACTIVE: Final = tuple(state for state in State if state not in FINAL)
PRIORITIES: Final = {
    Priority.RESTORE: "restore",
    Priority.REQUEST: "request",
    Priority.PREFETCH: "prefetch",
    Priority.PROMOTION: "prefetch",
    Priority.DEMOTION: "demotion",
    Priority.PERSISTENCE: "demotion",
}


class Keeper:
    """Works while `run` runs. `node` is the node's name in the registry."""

    def __init__(
        self,
        engine: Engine,
        hub: Hub,
        catalogue: Callable[[], Catalogue],
        tiers: NodeTiers,
        uses: Uses,
        settings: Callable[[], Tiers],
        memory: Callable[[], wire.HostMemory],
        node: str,
        log: Any,
    ) -> None:
        self._engine, self._hub, self._catalogue, self._tiers = engine, hub, catalogue, tiers
        self._uses, self._settings, self._memory, self._node, self._log = uses, settings, memory, node, log
        self._suspended: dict[str, float] = {}
        self._attempts = Attempts()
        self._clock = _Clock()
        self._healthy, self._look_at = False, 0.0
        self._looking: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Decide until this is cancelled."""
        await self._engine.ready()
        try:
            while True:
                settings, began = self._settings(), time.monotonic()
                if settings.policy.enabled:
                    try:
                        await self.step()
                    except (Failure, OSError) as error:
                        self._log.warning("policy.not_decided", error=str(error))
                await asyncio.sleep(max(1.0, settings.policy.interval, (time.monotonic() - began) / SHARE))
        finally:
            if self._looking is not None:
                self._looking.cancel()

    async def step(self) -> tuple[Action, ...]:
        """Decide once, submit what is new of it, and return all that was decided."""
        settings = self._settings()
        actions = await asyncio.to_thread(decide, await self._state(settings), rules_of(settings))
        for action in actions:
            if self._attempts.is_due(_subject(action), time.monotonic()):
                await self._carry_out(action)
        return actions

    # -- what there is

    async def _state(self, settings: Tiers) -> PolicyState:
        now, trusted = self._clock.read()
        rows = await asyncio.to_thread(self._rows)
        operations = await self._engine.list(Wanted(ACTIVE, limit=1000))
        uses = await self._uses.all()
        roots = {tier.name: str(tier.root) for tier in self._tiers.local()}
        images = gather.image_states(rows, self._node, operations, roots)
        used = {name: sum(one.replicas[name].bytes for one in images if name in one.replicas) for name in self._names()}
        rooms = await self._rooms(used)
        return PolicyState(
            now=now,
            tiers=gather.tier_states(settings, rooms),
            images=images,
            suspended=gather.suspended_states(self._containers(now), self._suspended),
            arena=self._arena(),
            uses=uses,
            clock_trusted=trusted,
        )

    def _names(self) -> list[str]:
        return self._tiers.names()

    def _rows(self) -> list[ImageRow]:
        """Return the images of which this node, or an object store, has a copy."""
        here, stored = Filter(node=self._node), Filter(tier=OBJECT)
        rows = (row for wanted in (here, stored) for row in every(self._catalogue(), wanted))
        return list({row.key: row for row in rows}.values())

    async def _rooms(self, used: dict[str, int]) -> dict[str, Room | None]:
        rooms: dict[str, Room | None] = {}
        for tier in self._tiers.local():
            try:
                space = await asyncio.to_thread(space_of, tier.root)
                rooms[tier.name] = Room(space.total, space.free, used[tier.name])
            except OSError as error:
                self._log.warning("tier.failed", tier=tier.name, error=str(error))
                rooms[tier.name] = None
        if OBJECT in self._tiers.names():
            rooms[OBJECT] = Room(used=used[OBJECT]) if await self._answers() else None
        return rooms

    async def _answers(self) -> bool:
        """Return whether the object store does, as the last look has found: no decision waits for a slow one."""
        if self._looking is None and time.monotonic() >= self._look_at:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None and (await asyncio.wait({self._looking}, timeout=LOOK_SECONDS))[0]:
            self._healthy = self._looking.result()
            self._looking, self._look_at = None, time.monotonic() + HEALTH_SECONDS
        return self._healthy

    async def _look(self) -> bool:
        try:
            tier = await self._tiers.object()
            await tier.room()
        except (Failure, OSError) as error:
            self._log.warning("tier.failed", tier=OBJECT, error=str(error))
            return False
        return True

    def _containers(self, now: float) -> list[wire.Container]:
        """Return all containers, and note since when each suspended one was seen to be."""
        found: list[wire.Container] = list(self._hub.objects("container"))
        suspended = {f"{one.namespace}/{one.id}" for one in found if one.gpu == wire.Container.SUSPENDED}
        self._suspended = {key: self._suspended.get(key, now) for key in suspended}
        return found

    def _arena(self) -> TierState | None:
        memory = self._memory()
        if not memory.arena_bytes:
            return None
        free = memory.arena_bytes - memory.arena_used_bytes
        return TierState(memory.arena_bytes, free, used_bytes=memory.arena_used_bytes)

    # -- what is to be done

    async def _carry_out(self, action: Action) -> None:
        """Submit it. What is refused, or fails, is tried again after longer and longer pauses while it is planned."""
        subject = _subject(action)  # until it has ended, the next decisions plan it again
        before = self._attempts.begin(subject, time.monotonic())
        if before == 1:
            pause = round(self._attempts.pause(2))
            self._log.warning("policy.stalled", action=subject[0], reason=action.reason, next_seconds=pause)
        try:
            if isinstance(action, Delete):
                await self._delete(action)
            else:
                arguments, labels = await self._arguments(action)
                operation = await self._engine.submit(Submission(arguments, requester=REQUESTER, labels=labels))
                self._log.info("policy.submitted", operation=operation.id, verb=operation.verb, reason=action.reason)
        except Failure as error:
            self._log.warning("policy.refused", action=type(action).__name__.lower(), error=str(error))

    async def _arguments(self, action: Copy | Evict | Park) -> tuple[Arguments, dict[str, str]]:
        reason = {"kybernate.io/reason": action.reason[:1000]}
        match action:
            case Copy():
                name = await asyncio.to_thread(self._named, action)
                return CopyImage(name, action.target, PRIORITIES[action.priority]), reason
            case Evict():
                name = await asyncio.to_thread(self._named, action)
                return EvictImage(name, action.tier), reason
            case Park():
                one = self._container_of(action)
                if one.pod:
                    return ParkContainer(one.id, one.namespace), reason
                return Checkpoint(one.id, one.namespace, exit=True), {**reason, PARKED: one.id}

    def _named(self, action: Copy | Evict) -> str:
        """Return the place of the copy that is moved: an id may be that of several. Raises Failure."""
        tier = action.tier if isinstance(action, Evict) else action.source
        roots = {one.name: str(one.root) for one in self._tiers.local()}
        row = self._catalogue().get(action.image.id)
        places = [one.place for one in row.replicas if gather.tier_of(one, self._node, roots) == tier]
        return min(places, default=action.image.id)

    def _container_of(self, action: Park) -> wire.Container:
        """Return a container with containerd's namespace; the policy knows Kubernetes' only."""
        found = (one for one in self._hub.objects("container") if one.id == action.container)
        return next(found, wire.Container(id=action.container))

    async def _delete(self, action: Delete) -> None:
        """Remove an image from all tiers, the slowest last, so that what is left in between is a whole image.

        An image that another node has made, or has a copy of, is that node's to delete.
        """
        row = await asyncio.to_thread(self._catalogue().get, action.image.id)
        foreign = {replica.node for replica in row.replicas} - {self._node, ""}
        if foreign or row.source.node not in ("", self._node, platform.node()):
            self._log.info("policy.left", image=action.image.id, nodes=sorted(foreign) or [row.source.node])
            return
        places = {replica.place for replica in row.replicas}  # another image may have the same id
        for tier in await self._tiers.all():
            held = [one async for one in tier.images() if one.ref.id == action.image.id and one.place in places]
            for one in held:
                await tier.remove(Ref(one.ref.namespace, one.ref.name, one.ref.id))
        for replica in row.replicas:
            await asyncio.to_thread(self._catalogue().drop_replica, replica.place, node=replica.node)
        self._log.info("policy.deleted", image=action.image.id, reason=action.reason)


class _Clock:
    """The wall clock, and whether it was steady lately."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._jumped = float("-inf")

    def read(self) -> tuple[float, bool]:
        """Return the time, and whether ages may be computed with it."""
        now, steady = time.time(), time.monotonic()
        if abs(now - steady - self._offset) > JUMP_SECONDS:
            self._jumped = steady
        self._offset = now - steady
        return now, steady - self._jumped > DISTRUST_SECONDS


def _subject(action: Action) -> tuple[object, ...]:
    """Return what an action is about, without its reason."""
    match action:
        case Copy():
            return ("copy", action.image, action.target)
        case Evict():
            return ("evict", action.image, action.tier)
        case Park():
            return ("park", action.namespace, action.container)
        case Delete():
            return ("delete", action.image)


@dataclass
class Attempts:
    """When the policy tries again what has not helped: after longer and longer pauses, so that no log or disk fills.

    Attempts are kept by subject. Times are those of a monotonic clock, in seconds.
    """

    first: float = FIRST_SECONDS
    longest: float = LONGEST_SECONDS
    _begun: dict[Hashable, tuple[float, int]] = field(default_factory=dict)  # when the last one began, and how many

    def is_due(self, subject: Hashable, now: float) -> bool:
        """Return whether a new attempt may begin."""
        at, count = self._begun.get(subject, (now, 0))
        return count == 0 or now - at >= self.pause(count)

    def begin(self, subject: Hashable, now: float) -> int:
        """Note that an attempt begins, and return how many there were before it, without those of long ago."""
        self._begun = {one: (at, count) for one, (at, count) in self._begun.items() if now - at < 2 * self.pause(count)}
        _, count = self._begun.get(subject, (now, 0))
        self._begun[subject] = now, count + 1
        return count

    def pause(self, count: int) -> float:
        """Return the seconds between the beginning of attempt number `count` and the next one."""
        return float(min(self.longest, self.first * 2.0 ** min(count - 1, 32)))

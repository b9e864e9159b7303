"""The arbiter's loop: the one owner of the state of the node's seats.

A turn reads what shims, NVML and the owner of room report, decides, and begins what was decided. All of that happens
between two awaits, so that nothing changes in between; what is begun ends in a task of its own, whose outcome begins
the next turn. A new run of the agent knows nothing of the former one: it reads everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from kybernate.agent.inventory.gpus import Activity, Sight
from kybernate.agent.seats.acting import Outcome
from kybernate.agent.seats.around import Around, Containers, NoUse, UseWatcher
from kybernate.agent.seats.claims import Claim, Key, assigned
from kybernate.agent.seats.facts import Seen, free, overrun, seated, standbys
from kybernate.agent.seats.former import Former
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import LIVE
from kybernate.seats.decide import decide
from kybernate.seats.groups import Place
from kybernate.seats.model import (
    NEVER,
    WAKEABLE,
    Action,
    Decision,
    Gpu,
    Park,
    Refuse,
    Request,
    Rules,
    Seat,
    Start,
    State,
    Status,
    Suspend,
    Swap,
    Turn,
    Wake,
)
from kybernate.seats.outcomes import begun, done, failed, requested
from kybernate.seats.plan import Plan
from kybernate.seats.sharing import crowded
from kybernate.verbs.room import Taker

LOOK_SECONDS: Final = 1.0  # between two looks at the GPUs, as long as a container has a seat
SOON_SECONDS: Final = 0.2  # between two while a seat waits for an active one's work to end: NVML samples as often
SAMPLE_SECONDS: Final = 1.5  # after which a sample says nothing of the present: some drivers take none without work
CALL_SECONDS: Final = 0.3  # for which a call that the library has noted counts as work
START_SECONDS: Final = 120.0  # clients of containerd give a Start two minutes
AGAIN_SECONDS: Final = 0.2  # between two looks at a node that does not answer
UNREAD: Final = "the agent reads the container's record"
MOST_ROUNDS: Final = 64  # decisions of one turn; each begins something or is the last


@dataclass
class _Kept:
    """What one run of the arbiter keeps of a container, to compare it with the next look."""

    mark: int = 0
    calls: int = 0
    wish: str = ""
    computed_at: float = 0.0
    called_at: float = 0.0
    error: str = ""

    def works(self, seen: Activity, calls: int, now: float) -> bool:
        """Take the next look; return whether it works on a GPU, by NVML's newest sample or by the library's calls."""
        if seen.mark > self.mark:
            self.computed_at = now
        if calls > self.calls:
            self.called_at = now
        self.mark, self.calls = seen.mark, calls  # they fall where a program of the driver, or ours, is started again
        on_gpu = seen.works and now - self.computed_at < SAMPLE_SECONDS
        return on_gpu or now - self.called_at < CALL_SECONDS


class Arbiter:
    """`ready` is set once the node has been read for the first time; until then containers with a seat wait.

    `former` are the last turns of containers under a former run of the agent.
    """

    def __init__(
        self,
        places: Sequence[Place],
        rules: Rules,
        around: Around,
        watcher: UseWatcher | None = None,
        former: Mapping[Key, Former] = MappingProxyType({}),
    ) -> None:
        self.places = {place.name: place for place in places}
        self.state = State.of((), (free(place, None, awaited=False) for place in places), rules)
        self.turns: Mapping[str, Turn] = {}
        self.keys: dict[str, Key] = {}  # the container of each seat that has one
        self.ready = asyncio.Event()
        self._around, self._watcher = around, watcher or NoUse()
        self._news, self._claimed, self._soon = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._sight: Sight | None = None
        self._healthy: frozenset[str] = frozenset()
        self._kept: dict[Key, _Kept] = {}
        self._acting: dict[str, asyncio.Task[None]] = {}  # by seat; a swap is under both of its names
        self._asked: list[tuple[str, Request]] = []
        self._without: frozenset[Key] = frozenset()  # containers for which there is no seat of their profile
        self._heard: dict[Taker, str] = {}  # those that wait for room, and what they were last told
        self._labels: dict[Key, str] = {}
        self._beside: set[asyncio.Task[None]] = set()  # tasks that nothing waits for
        self._former: set[str] = set()  # operations of a former run that have been cancelled
        self._turns_before = dict(former)

    # ---- for others: on the event loop's thread, and never blocking

    def grant(self, taker: Taker, before: Sequence[Taker]) -> str:
        """Let a container with a seat take memory once its room is claimed; see Grant."""
        key = taker.namespace, taker.container
        claim = self._around.containers.claims().get(key)
        if claim is None:
            return unread(self._around.containers, self._around.container(key), taker)
        seat = self.seat_of(key)
        if taker not in self._heard:
            self.wake()
        if not self.ready.is_set():
            return "the agent reads the state of the node's seats"
        if seat is None:
            return f"all seats of profile {claim.profile} are taken" if claim.profile else f"no seat {claim.seat} here"
        if seat.status == Status.WAKING and seat.partner and not self._swaps(taker.operation, seat.partner):
            return f"it is being woken in the place of {seat.partner}"  # which has not left yet
        if seat.status in (Status.STARTING, Status.WAKING, Status.ACTIVE):
            return ""
        turn = self.turns.get(seat.name)
        return turn.reason if turn else "its seat's turn is being decided"

    def _swaps(self, operation: str, out: str) -> bool:
        """Return whether an operation is a swap of the arbiter's, or one by which a seat leaves."""
        return self._around.is_own(operation) or self._around.leaves(operation) == self.keys.get(out, ("", ""))

    def is_seated(self, namespace: str, container: str) -> bool:
        """Return whether a container has, or waits for, a seat of its own."""
        return (namespace, container) in self._around.containers.claims()

    def seat_of(self, key: Key) -> Seat | None:
        name = next((name for name, one in self.keys.items() if one == key), "")
        return self.state.seats.get(name)

    def ask(self, key: Key, cause: str, deadline: float = NEVER) -> None:
        """Ask that a container's seat be active, unless it asks already for the same cause."""
        seat = self.seat_of(key)
        if seat is not None:
            self._asked.append((seat.name, Request(self._around.clock(), cause, deadline)))
            self.wake()

    def used(self, key: Key) -> None:
        """Take a use of a suspended container as a request, where its policy says so."""
        claim = self._around.containers.claims().get(key)
        if claim is not None and claim.wake_on_use:
            self.ask(key, "use")

    def forget(self, key: Key) -> None:
        """End the requests of a container: it was put to sleep on request."""
        seat = self.seat_of(key)
        if seat is not None and seat.requests and not seat.occupies:
            self.state = self.state.with_seat(replace(seat, requests=()))
            self.wake()

    def suspended(self) -> list[Key]:
        """Return the containers of which a use is a request."""
        claims = self._around.containers.claims()
        names = (name for name, seat in self.state.seats.items() if seat.status in WAKEABLE and name in self.keys)
        return [key for key in map(self.keys.__getitem__, names) if key in claims and claims[key].wake_on_use]

    def active(self) -> dict[Key, frozenset[int]]:
        """Return the processes that hold memory of GPUs, of the containers that are let onto them."""
        if self._sight is None:
            return {}
        there = [
            self.keys[name]
            for name, seat in self.state.seats.items()
            if seat.status == Status.ACTIVE and name in self.keys
        ]
        return {key: self._sight.processes.get(key, frozenset()) for key in there}

    def wake(self) -> None:
        """Have a turn soon: something has changed."""
        self._news.set()

    def error_of(self, key: Key) -> str:
        return self._kept[key].error if key in self._kept else ""

    # ---- the loop

    async def run(self) -> None:
        """Own the seats until cancelled; what has been begun then continues without the arbiter."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watcher.run(self.suspended, self.used, self.active))
                group.create_task(self._looking())
                group.create_task(self._turning())
        finally:
            for task in self._acting.values():
                task.cancel()

    async def _looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(min(SOON_SECONDS, LOOK_SECONDS))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, LOOK_SECONDS - SOON_SECONDS)):
                    await self._soon.wait()
            if self._sight is not None and not self._around.containers.claims():
                self._claimed.clear()
                await self._claimed.wait()

    async def look(self) -> bool:
        """Ask the driver; return whether it answers. Else what is known stays: which GPU is sick is not known then."""
        found = await self._around.look()
        if found is not None:
            self._sight = found
        self.wake()
        return found is not None

    async def _turning(self) -> None:
        while True:
            self._news.clear()
            look_at = self._turn()
            try:
                async with asyncio.timeout(max(0.0, min(look_at - self._around.clock(), LOOK_SECONDS))):
                    await self._news.wait()
            except TimeoutError:
                pass

    def _turn(self) -> float:
        """Read, decide, begin; return when time alone may change something.

        Nothing is decided before the driver has answered: until then, what holds memory cannot be told from what does
        not, and what a former run of the agent has let in would not count.
        """
        if self._sight is None:
            return NEVER
        now = self._around.clock()
        self._cancel_former()
        self._read(now)
        decision = Decision()
        for _ in range(MOST_ROUNDS):
            decision = decide(self.state, now)
            for action in decision.actions:
                self._begin(self._as_asked(action, decision.turns), now)
            if not decision.actions:
                break
        self.turns = decision.turns
        (self._soon.set if self._awaits_rest() else self._soon.clear)()
        self.ready.set()
        plan = Plan(self.state, now)
        for name, seat in self.state.seats.items():
            key = self.keys.get(name)
            error, no_room = (self.error_of(key), crowded(plan, seat)) if key else ("", False)
            self._around.publish(seat, key, self.turns.get(name), error, no_room)
        self._around.show_turns({key: self.state.seats[name].is_its_turn for name, key in self.keys.items()})
        waiting = self._around.waiting()
        self._heard = {one: self._heard.get(one, "") for one in waiting}
        told = {one: self.grant(one, ()) for one in waiting}
        if told != self._heard:
            self._heard = told
            self._around.look_again()
        return decision.look_at

    # ---- reading

    def _read(self, now: float) -> None:
        claims = self._around.containers.claims()
        if claims:
            self._claimed.set()
        found = {key: one for key in claims if (one := self._around.container(key)) is not None and one.state in LIVE}
        keys = self._assigned({key: claims[key] for key in found})
        waits = {(one.namespace, one.container): one
                 for one in self._around.waiting() if one.operation not in self._former}  # fmt: skip
        takes = {(one.namespace, one.container) for one in self._around.taking()}
        same = {name for name, key in self.keys.items() if keys.get(name) == key}
        former = {name: self.state.seats[name].stands_by_for for name in same}
        named = standbys(keys, claims, found, self.places, former)
        seats = []
        for name, place in self.places.items():
            key, old = keys.get(name), self.state.seats[name]
            if name not in same:
                self._drop(name)
            if key is None:
                seats.append(free(place, old, awaited=name in named.values()))
                continue
            seen = self._seen(
                key, found[key], claims[key], waits.get(key), named.get(name, ""), now, takes=key in takes
            )
            before = old if name in same else None
            seats.append(seated(place, seen, before, now, acting=name in self._acting))
            if not seats[-1].may_share and (before is None or before.may_share):
                self._note("seat.overrun", "warning", overrun(claims[key], seats[-1]), key)
        self.keys = keys
        self._labels = {key: name for key, name in self._labels.items() if key in claims}
        for key in self._kept.keys() - set(keys.values()):
            del self._kept[key]
        claimed = sum(one.ram_bytes for one in seats if one.status == Status.SUSPENDING)
        ram, arena = self._around.free_memory()
        self.state = State.of(self._gpus(), seats, self.state.rules, ram - claimed, arena)
        self._expire_starts(now)
        self._take_requests()

    def _seen(
        self,
        key: Key,
        container: wire.Container,
        claim: Claim,
        waits: Taker | None,
        stands: str,
        now: float,
        *,
        takes: bool,
    ) -> Seen:
        wish = self._around.wish(container)
        doing = self._sight.activities.get(key, Activity()) if self._sight else Activity()
        calls = self._watcher.calls(key) or 0
        kept = self._kept.setdefault(key, _Kept(doing.mark, calls, wish))
        if wish != kept.wish:
            kept.wish = wish
            if wish:
                self.ask(key, "annotation")
        busy = kept.works(doing, calls, now) or container.active_until.ToMicroseconds() / 1e6 > now
        priority = self._around.priority(container)
        return Seen(
            container,
            claim,
            max(self._sight.held.get(key, {}).values(), default=0) if self._sight else None,
            busy,
            claim.priority if priority is None else priority,
            "" if waits is None else "operation" if waits.operation else "start",
            stands,
            takes,
            self._around.asked(waits.operation) if waits is not None and waits.operation else NEVER,
            self._turns_before.pop(key, None),
        )

    def _awaits_rest(self) -> bool:
        """Return whether a seat waits for what an active one's next pause may end."""
        before = (self.state.seats.get(name) for turn in self.turns.values() for name in turn.before)
        return any(seat is not None and seat.status == Status.ACTIVE for seat in before)

    def _assigned(self, claims: Mapping[Key, Claim]) -> dict[str, Key]:
        """Return the container of each seat, and keep what was chosen here in containerd."""
        given = assigned(claims, self.keys, self.places, self._around.kubelets(), self._uuids())
        for name, key in given.keys.items():
            if claims[key].profile and name not in (claims[key].seat, self._labels.get(key)):
                self._keep_label(key, name)
        for key in given.lacking - self._without:
            self._note("seat.lacking", "warning", f"all seats of profile {claims[key].profile} are taken", key)
        self._without = given.lacking
        return given.keys

    def _gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs by their device nodes' numbers; one that a driver reports no more is not healthy."""
        there = dict(_numbered(self._sight))
        before = {gpu.index: gpu for gpu in self.state.gpus}
        gone = [replace(gpu, healthy=False, free_bytes=0) for index, gpu in before.items() if index not in there]
        found = [Gpu(index, gpu.total_bytes, gpu.free_bytes or 0) for index, gpu in there.items()]
        return tuple(sorted([*found, *gone], key=lambda gpu: gpu.index))

    def _uuids(self) -> dict[int, str]:
        return {index: gpu.uuid for index, gpu in _numbered(self._sight)}

    def _expire_starts(self, now: float) -> None:
        """Give up a start that no shim waits for any more, and that has not come to a running container."""
        for name, seat in self.state.seats.items():
            container = self._around.container(self.keys[name]) if name in self.keys else None
            late = seat.status == Status.STARTING and now - seat.since > START_SECONDS
            if late and container is not None and container.state == wire.Container.CREATED and not container.operation:
                self.state = self.state.with_seat(failed(seat, now, self.state.rules))

    def _take_requests(self) -> None:
        asked, self._asked = self._asked, []
        for name, request in asked:
            seat = self.state.seats[name]
            if (
                name in self.keys
                and seat.status != Status.FREE
                and not any(one.cause == request.cause for one in seat.requests)
            ):
                self.state = self.state.with_seat(requested(seat, request))

    # ---- acting

    def _as_asked(self, action: Action, turns: Mapping[str, Turn]) -> Action:
        """Return the swap of another caller that waits, in place of the suspend by which its room is made.

        It has its two containers for itself: a suspend of the one would wait for it, and it for that.
        """
        if not isinstance(action, Suspend) or (out := self.keys.get(action.seat)) is None:
            return action
        for one in self._around.waiting():
            seat = self.seat_of((one.namespace, one.container))
            if seat is None or not one.operation or self._around.leaves(one.operation) != out:
                continue
            turn = turns.get(seat.name)
            if turn is not None and turn.before == (action.seat,) and seat.status == Status.SUSPENDED:
                return Swap(seat.name, action.seat, action.reason, action.again)
        return action

    def _begin(self, action: Action, now: float) -> None:
        key = self.keys.get(action.seat)
        if key is None and not isinstance(action, Refuse):
            return
        self.state = begun(self.state, action, now)
        match action:
            case Start():
                self._around.look_again()
            case Wake():
                waits, acts = self._waits(key), self._around.acts
                if waits:
                    self._act(acts.ended(waits), action.seat)
                    self._around.look_again()
                elif key is not None:
                    self._act(acts.wake(action.seat, key), action.seat)
            case Swap() if key is not None and action.out in self.keys:
                self._say("seat.suspended", action.out, f"{action.seat} takes its place, {action.reason}")
                asked = self._waits(key)
                if asked:
                    self._act(self._around.acts.ended(asked), action.seat, action.out)
                    self._around.look_again()
                else:
                    swap = self._around.acts.swap(action.seat, self.keys[action.out], key, again=action.again)
                    self._act(swap, action.seat, action.out)
            case Suspend() if key is not None:
                self._say("seat.suspended", action.seat, action.reason)
                self._act(self._around.acts.suspend(action.seat, key, again=action.again), action.seat)
            case Park() if key is not None:
                self._act(self._around.acts.park(action.seat, key), action.seat)
            case Refuse():
                self._say("seat.refused", action.seat, action.reason, "warning")

    def _waits(self, key: Key | None) -> str:
        """Return the operation that waits for a container's room, "" where none does."""
        found = (one.operation for one in self._around.waiting() if (one.namespace, one.container) == key)
        return next(filter(None, found), "")

    def _act(self, work: Coroutine[Any, Any, Outcome], *seats: str) -> None:
        keys = {name: self.keys[name] for name in seats}
        task = asyncio.create_task(self._carried_out(work, keys))
        for name in seats:
            self._acting[name] = task

    async def _carried_out(self, work: Coroutine[Any, Any, Outcome], keys: Mapping[str, Key]) -> None:
        """Wait for an outcome, then look at what is there before the next turn relies on it.

        What was reported before the outcome is no answer. As long as containerd or the driver are away, the seats stay
        as they were while the action ran, and keep their GPUs.
        """
        try:
            outcome = await work
        except Exception as error:  # noqa: BLE001  # one seat's defect must not end the others' turns
            outcome = Outcome(False, repr(error))
        while not await self._looked_at(keys.values()):  # noqa: ASYNC110  # neither says when it answers again
            await asyncio.sleep(AGAIN_SECONDS)
        now = self._around.clock()
        for name, key in keys.items():
            if self._acting.get(name) is asyncio.current_task():
                del self._acting[name]
                if self.keys.get(name) == key:
                    self._settle(name, key, outcome, now)
        self.wake()

    async def _looked_at(self, keys: Iterable[Key]) -> bool:
        """Look at the GPUs and at containers; return whether all of that was possible."""
        looks = (self._around.containers.looked_at(*key) for key in keys)
        return all(await asyncio.gather(self.look(), *looks))

    def _settle(self, name: str, key: Key, outcome: Outcome, now: float) -> None:
        """Take the outcome of one seat's action: what its container is now decides, and not what was answered."""
        seat, container = self.state.seats[name], self._around.container(key)
        if container is None or seat.status not in (Status.WAKING, Status.SUSPENDING, Status.PARKING):
            return
        away = container.gpu == wire.Container.SUSPENDED or self._holds_nothing(key)
        reached = {
            Status.WAKING: container.gpu in (wire.Container.ATTACHED, wire.Container.NO_GPU), Status.SUSPENDING: away,
            Status.PARKING: container.parked_bytes > 0,
        }  # fmt: skip
        kept = self._kept.setdefault(key, _Kept())
        if outcome.succeeded or (not outcome.succeeded and reached.get(seat.status, False) and container.state in LIVE):
            found = done(seat, now)
            seconds = outcome.seconds or now - seat.since
            if seat.status == Status.WAKING:
                found = replace(found, wake_seconds=seconds)
            elif seat.status == Status.SUSPENDING:
                found = replace(found, suspend_seconds=seconds)
            kept.error = ""
            self.state = self.state.with_seat(found)
            return
        kept.error = outcome.error
        changed = failed(seat, now, self.state.rules)
        self.state = self.state.with_seat(changed)
        if seat.status == Status.WAKING or changed.failures == 1:
            verb = {Status.WAKING: "woken", Status.SUSPENDING: "suspended"}.get(seat.status, "parked")
            later = "a new request tries again" if changed.status == Status.FAILED else (
                f"it is tried again in {changed.retry_at - now:.0f} s"
            )  # fmt: skip
            self._say("seat.failed", name, f"it could not be {verb}: {outcome.error}; {later}", "warning")

    def _holds_nothing(self, key: Key) -> bool:
        return self._sight is not None and not any(self._sight.held.get(key, {}).values())

    def _drop(self, name: str) -> None:
        """End what was being done for a container that is gone; its operation ends by itself."""
        task = self._acting.pop(name, None)
        if task is not None and task not in self._acting.values():
            task.cancel()

    def _keep_label(self, key: Key, seat: str) -> None:
        """Keep a container's seat in containerd, where the next run of the agent finds it."""
        self._labels[key] = seat
        task = asyncio.ensure_future(self._around.label(key, seat))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _cancel_former(self) -> None:
        """Cancel what a former run has begun and what still waits for room.

        It was decided on what was true then. A swap would keep the container that is to leave from being suspended.
        """
        acting = {self.keys[name] for name in self._acting if name in self.keys}
        for one in self._around.waiting():
            is_former = one.operation and (one.namespace, one.container) not in acting
            if is_former and one.operation not in self._former and self._around.is_own(one.operation):
                self._former.add(one.operation)
                task = asyncio.ensure_future(self._around.acts.cancel(one.operation))
                self._beside.add(task)
                task.add_done_callback(self._beside.discard)

    def _say(self, type: str, seat: str, reason: str, level: str = "info") -> None:
        self._note(type, level, f"seat {seat}: {reason}", self.keys.get(seat))

    def _note(self, type: str, level: str, message: str, key: Key | None) -> None:
        about = {"namespace": key[0], "container": key[1]} if key else {}
        self._around.note(type, level, message, **about)


def _numbered(sight: Sight | None) -> list[tuple[int, Any]]:
    gpus = sight.gpus if sight is not None else ()
    return [(gpu.number if gpu.number is not None else place, gpu) for place, gpu in enumerate(gpus)]


def unread(containers: Containers, container: wire.Container | None, taker: Taker) -> str:
    """Return that a taker's container is not known yet, and so neither whether it has a seat; "" once that is known."""
    if not taker.exists or container is not None or containers.is_gone(taker.namespace, taker.container):
        return ""
    containers.touch(taker.namespace, taker.container)
    return UNREAD

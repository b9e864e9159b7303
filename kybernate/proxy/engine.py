"""The one writer of what is held: carries out what `holding.decide` says, by clock, wakes and data planes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Final, Protocol

from kybernate.node.failure import Failure
from kybernate.proxy import holding
from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.holding import Drain, Held, Phase, Refuse, Release, Reopen, Suspend, Ticket, Wake
from kybernate.proxy.models import Models, SuspendFailed, WakeFailed, port_accepts
from kybernate.proxy.record import LastWake
from kybernate.proxy.routing import Load
from kybernate.proxy.settings import Model
from kybernate_shim.logs import Log

LOOK_SECONDS: Final = 0.02  # between two looks at what another data plane has in flight, while a model drains
WATCH_PAUSE: Final = 1.0
DEFECT: Final = "the proxy failed; its log has the reason"
Work = Callable[[], Coroutine[Any, Any, None]]


class Refused(Exception):
    """A request that waited is answered with `refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Gate(Protocol):
    """Another data plane, which passes requests of awake models by itself."""

    async def open(self, name: str) -> None:
        """Have it pass a model's requests."""
        ...

    async def close(self, name: str) -> None:
        """Have it give them to this process."""
        ...

    async def in_flight(self, name: str) -> int:
        """Return how many it has passed that have not ended."""
        ...

    async def limit(self, name: str, most: int) -> int:
        """Have it pass no more than so many of a model's requests at one time; return how many the model has then."""
        ...


class Figures(Protocol):
    """What is counted."""

    def woke(self, name: str, outcome: str, seconds: float) -> None: ...

    def suspended(self, name: str, outcome: str, seconds: float) -> None: ...


@dataclass
class Admission:
    """The right to pass one request on, until the end of its `with`.

    `waited` is seconds in the queue; `cold` says that the model was not awake when the request came.
    """

    held: Held
    waited: float
    cold: bool
    _ended: Callable[[Held], None]

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended(self.held)


class Engine:
    """Holds the requests of all models. Everything here runs in one event loop."""

    def __init__(
        self, source: Models, models: Iterable[Model], figures: Figures, log: Log, gate: Gate | None = None
    ) -> None:
        self._source, self._figures, self._log, self.gate = source, figures, log, gate
        self.held = {
            one.name: Held(one, Phase.ABSENT if one.container else Phase.AWAKE, closed=gate is None) for one in models
        }
        self._ids = count(1)
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._last_wake: dict[str, float] = {}
        self._wakes: dict[str, LastWake] = {}
        self._said: dict[str, list[Phase]] = {}  # by the source, of a model, since this engine's last work on it began
        self._works: dict[str, asyncio.Task[None]] = {}  # the one work on each model, while it lasts
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._gates = {name: asyncio.Lock() for name in self.held}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.upstream_of: Callable[[Model], str] = lambda model: model.upstream  # it may move with its container
        self.crowded: Callable[[str], bool] = lambda name: False  # whether one that sleeps has no room to wake
        self.seen = asyncio.Event()  # the source has said something of its models
        self.listeners: list[Callable[[Held], None]] = []  # told when what a model has may have changed

    # -- what a data plane asks

    def load(self, name: str) -> Load:
        """Return how a model is; one of a peer is always awake."""
        if (held := self.held.get(name)) is None:
            return Load(True, 0, 0, 0)
        in_flight = max(held.in_flight, held.elsewhere)
        limit = holding.limit_of(held)
        awake = held.phase == Phase.AWAKE
        concurrency = 0 if limit == inf else max(1, int(limit))
        return Load(awake, in_flight, len(held.waiting), concurrency, not awake and self.crowded(name))

    def place_in_queue(self, name: str, id: int) -> int:
        """Return the place of a ticket among those that wait, from 1 on; 0 where it waits no more."""
        return next((place for place, one in enumerate(self.held[name].waiting, 1) if one == id), 0)

    def usual_wake(self, name: str) -> float:
        """Return how many seconds the last wake of a model took, 0 where there was none."""
        return self._last_wake.get(name, 0.0)

    def last_wake(self, name: str) -> LastWake | None:
        """Return when a model woke last, however that ended; None where it has not."""
        return self._wakes.get(name)

    def try_pass(self, name: str) -> Admission | None:
        """Admit a request that need not wait."""
        held = self.held[name]
        if not holding.can_pass(held):
            return None
        holding.began(held, self._loop.time())
        if held.in_flight == 1:
            self._tell(held)
        return Admission(held, 0.0, False, self._ended)

    def enqueue(self, name: str, *, bytes: int, deadline: float) -> tuple[int, asyncio.Future[None]]:
        """Let a request wait; `deadline` is in seconds from now. The future ends when it may pass, or with Refused.

        A caller that gives up before calls `leave`, one that was released calls `admitted`. Raises Refused.
        """
        held, now = self.held[name], self._loop.time()
        ticket = Ticket(next(self._ids), bytes, now, now + min(deadline, held.model.queue.age))
        if refusal := holding.offer(held, ticket, now):
            raise Refused(refusal)
        holding.arrived(held, ticket)
        future = self._futures[ticket.id] = self._loop.create_future()
        self._step(held)
        return ticket.id, future

    def leave(self, name: str, id: int) -> None:
        """Take a request out of the queue whose client is gone; one that was released meanwhile has ended."""
        held, future = self.held[name], self._futures.pop(id, None)
        if future is None:
            return
        if id in held.waiting:
            holding.left(held, id)
            self._step(held)
        elif future.done() and not future.cancelled() and future.exception() is None:
            self._ended(held)

    async def wait(self, name: str, *, bytes: int = 0, deadline: float = inf) -> Admission:
        """Return once a request may be passed on. Raises Refused; a caller that is cancelled leaves the queue."""
        if passed := self.try_pass(name):
            return passed
        began, cold = self._loop.time(), self.held[name].phase != Phase.AWAKE
        id, future = self.enqueue(name, bytes=bytes, deadline=deadline)
        try:
            await future
        except BaseException:
            self.leave(name, id)
            raise
        return self.admitted(name, id, began, cold)

    def admitted(self, name: str, id: int, began: float, cold: bool) -> Admission:
        """Return the admission of a ticket whose future has ended well."""
        del self._futures[id]
        return Admission(self.held[name], self._loop.time() - began, cold, self._ended)

    def want_suspended(self, name: str, *, makes_way: bool = False) -> None:
        """Suspend a model as soon as it has nothing in flight, however short it was idle.

        One that `makes_way` for another is suspended even if more requests arrive: these wait, and wake it afterwards.
        """
        held = self.held[name]
        held.suspend_wanted = held.phase in (Phase.AWAKE, Phase.DRAINING)
        held.makes_way = held.suspend_wanted and (makes_way or held.makes_way)
        self._step(held)

    # -- what it does

    async def run(self) -> None:
        """Follow the states of the models, without an end. Those without a container are awake from the beginning.

        A defect ends no more than one watch: models whose states are not followed would have requests that wait.
        """
        for held in self.held.values():
            if held.phase == Phase.AWAKE and self.gate is not None:
                self._spawn(self._set_gate(held))
        while True:
            try:
                async for name, phase in self._source.watch():
                    self._observe(self.held[name], phase)
                    self.seen.set()
            except Failure as error:
                self._log.warning("proxy.watch_failed", error=str(error))
            except Exception as error:  # noqa: BLE001  # see above; the log has it
                self._log.error("proxy.watch_failed", error=repr(error), exc_info=True)
            await asyncio.sleep(WATCH_PAUSE)

    async def close(self) -> None:
        """Refuse all that wait, and end."""
        for held in self.held.values():
            for id in list(held.waiting):
                refusal = Refusal(503, "proxy_stopped", "the proxy is being stopped", held.model.retry_after)
                self._refuse(held, id, refusal)
        for timer in self._timers.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def elsewhere(self, name: str, in_flight: int, *, used: bool, running: int = 0) -> None:
        """Take what another data plane has in flight, `running` of them at the model itself, the rest in its queue.

        `used` says whether it passed anything since it was last asked.
        """
        held = self.held[name]
        held.elsewhere, held.running = in_flight, running
        if in_flight or used:
            held.busy_until = self._loop.time()
        self._step(held)

    def used(self, name: str) -> None:
        """Take that a model was at work by other means than requests that pass here."""
        held = self.held[name]
        holding.used(held, self._loop.time())
        self._step(held)

    def grant(self, name: str, count: int) -> None:
        """Let a model have so many requests from here at one time: the share of this proxy."""
        held = self.held[name]
        if (before := held.granted) == count:
            return
        held.granted = count
        if self.gate is not None:
            held.limited = before if before is not None else 0
            self._spawn(self._set_gate(held))
        self._step(held)

    def _tell(self, held: Held) -> None:
        for listener in self.listeners:
            listener(held)

    def _ended(self, held: Held) -> None:
        holding.ended(held, self._loop.time())
        self._step(held)

    def _observe(self, held: Held, phase: Phase) -> None:
        """Take what the source sees, unless the model is in the middle of what this engine does with it.

        Where its container is gone, that has no object any more: its failure is none of the next container's.
        """
        name = held.model.name
        if held.phase in (Phase.WAKING, Phase.SUSPENDING) and name in self._works:
            if phase != Phase.ABSENT:
                self._said[name].append(phase)
                return
            self._works.pop(name).cancel()
        if phase == held.phase:
            return
        if phase == Phase.AWAKE:
            if held.phase != Phase.DRAINING:
                self._begin(held, Phase.WAKING, partial(self._wake, held, ask=False))
                self._said[name].append(phase)
            return
        if phase != Phase.WAKING:
            self._move(held, phase)
            self._step(held)

    def _step(self, held: Held) -> None:
        """Carry out what is to be done now, and look again when that may change by itself."""
        while actions := holding.decide(held, self._loop.time()):
            for action in actions:
                self._carry_out(held, action)
        name = held.model.name
        if timer := self._timers.pop(name, None):
            timer.cancel()
        if (when := holding.next_time(held)) < inf:
            self._timers[name] = self._loop.call_at(when, self._step, held)
        self._tell(held)

    def _carry_out(self, held: Held, action: holding.Action) -> None:
        match action:
            case Release(id):
                holding.left(held, id)
                if not (future := self._futures[id]).done():  # else its client has hung up, and it is about to leave
                    holding.began(held, self._loop.time())
                    future.set_result(None)
            case Refuse(id, refusal):
                self._refuse(held, id, refusal)
            case Wake():
                self._begin(held, Phase.WAKING, partial(self._wake, held, ask=True))
            case Drain():
                self._begin(held, Phase.DRAINING, partial(self._drain, held))
            case Reopen(given_up):
                held.suspend_wanted = held.suspend_wanted and not given_up
                held.makes_way = held.makes_way and not given_up
                self._move(held, Phase.AWAKE)
            case Suspend():
                work = partial(self._suspend, held, unless_used=not held.suspend_wanted)
                self._begin(held, Phase.SUSPENDING, work)

    def _refuse(self, held: Held, id: int, refusal: Refusal) -> None:
        holding.left(held, id)
        future = self._futures.pop(id)
        if not future.done():
            future.set_exception(Refused(refusal))

    def _begin(self, held: Held, phase: Phase, work: Work) -> None:
        """Work on a model, in place of what was worked on it until now, which may be what begins this."""
        name = held.model.name
        if (before := self._works.pop(name, None)) is not None and before is not asyncio.current_task():
            before.cancel()
        self._said[name] = []  # here: the source may say the next thing before the work begins
        self._move(held, phase)
        self._works[name] = self._spawn(self._working(name, work))  # here, too

    async def _working(self, name: str, work: Work) -> None:
        try:
            await work()
        finally:
            if self._works.get(name) is asyncio.current_task():  # and not the next one, which began at its end
                del self._works[name]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _move(self, held: Held, phase: Phase) -> None:
        was, name = held.phase, held.model.name
        holding.moved(held, phase, self._loop.time())
        self._log.debug("proxy.model_moved", model=name, phase=phase, was=was)
        if self.gate is None:
            held.closed = True
        elif Phase.AWAKE in (was, phase) and was != phase:
            self._spawn(self._set_gate(held))

    async def _set_gate(self, held: Held) -> None:
        """Open or close the other data plane as the model is by now; tasks of one model take turns."""
        assert self.gate is not None
        name = held.model.name
        async with self._gates[name]:
            is_open = held.phase == Phase.AWAKE and held.granted != 0
            try:
                if (granted := held.granted) is not None and is_open:
                    held.running, held.limited = await self.gate.limit(name, granted), granted
                await (self.gate.open(name) if is_open else self.gate.close(name))
                if granted == 0:
                    held.running, held.limited = await self.gate.limit(name, 0), 0
            except OSError as error:
                self._log.warning("proxy.gate_failed", model=name, error=str(error))
                return  # what is not known to be closed is not suspended
            held.closed = not is_open
            if not is_open:
                held.elsewhere = await self.gate.in_flight(name)
        self._step(held)

    async def _drain(self, held: Held) -> None:
        while held.phase == Phase.DRAINING and self.gate is not None:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                held.elsewhere = await self.gate.in_flight(held.model.name)
            except OSError:
                continue
            self._step(held)

    async def _wake(self, held: Held, *, ask: bool) -> None:
        """Wake a model and wait for its port; `ask` is false where something else has woken it."""
        model, began = held.model, self._loop.time()
        failure: WakeFailed | None = WakeFailed("it was given up")
        record = self._wakes[model.name] = LastWake(time.monotonic(), inf, "")
        try:
            failure = await self._tried(model, ask=ask)
        finally:
            seconds, outcome = self._loop.time() - began, "failed" if failure else "woken"
            self._figures.woke(model.name, outcome, seconds)
            if self._wakes[model.name] is record:
                self._wakes[model.name] = replace(record, ended=time.monotonic(), outcome=outcome)
        if failure:
            self._log.warning("proxy.wake_failed", model=model.name, error=str(failure))
            holding.wake_failed(held, str(failure), self._loop.time(), absent=failure.absent)
        else:
            self._last_wake[model.name] = seconds
            self._log.info("proxy.model_resumed", model=model.name, wake_ms=round(seconds * 1000, 1))
            # Something else may have been faster again. A source that is late says how the model came to sleep before.
            asleep = self._has_left(model.name, Phase.AWAKE, by=Phase.ASLEEP)
            self._move(held, Phase.ASLEEP if asleep else Phase.AWAKE)
        self._step(held)

    async def _tried(self, model: Model, *, ask: bool) -> WakeFailed | None:
        """Wake a model and wait for its port; return why it is not awake, None where it is."""
        stage = "its container"
        try:
            async with asyncio.timeout(model.wake_timeout or None):
                if ask:
                    await self._source.wake(model)
                upstream = self.upstream_of(model)
                stage = f"its port, {upstream},"
                await port_accepts(upstream)
        except WakeFailed as error:
            return error
        except TimeoutError:
            return WakeFailed(f"{stage} was not ready within {model.wake_timeout:.0f} s")
        except Exception as error:  # noqa: BLE001  # or its requests would wait; the log has it
            self._log.error("proxy.work_failed", model=model.name, error=repr(error), exc_info=True)
            return WakeFailed(DEFECT)
        return None

    async def _suspend(self, held: Held, *, unless_used: bool) -> None:
        model, began = held.model, self._loop.time()
        outcome = "suspended"
        try:
            await self._source.suspend(model, unless_used=unless_used)
        except SuspendFailed as error:
            outcome = "used" if error.used else "failed"
            tell = self._log.debug if error.used else self._log.warning
            tell("proxy.suspend_failed", model=model.name, error=str(error))
        except Exception as error:  # noqa: BLE001  # as above
            outcome = "failed"
            self._log.error("proxy.work_failed", model=model.name, error=repr(error), exc_info=True)
        self._figures.suspended(model.name, outcome, self._loop.time() - began)
        if outcome == "suspended":
            asleep = not self._has_left(model.name, Phase.ASLEEP, by=Phase.AWAKE)
        else:  # the agent may have ended before it could say that it was done
            asleep = self._said[model.name][-1:] == [Phase.ASLEEP]
        self._move(held, Phase.ASLEEP if asleep else Phase.AWAKE)
        self._step(held)

    def _has_left(self, name: str, phase: Phase, *, by: Phase) -> bool:
        """Return whether the source has said, since the work began, that a model was in a phase, and is in `by` now."""
        said = self._said[name]
        return said[-1:] == [by] and phase in said

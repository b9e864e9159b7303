"""The engine: takes operations, and sees each of them to its end. The edge between `decide`, the journal and the node.

Every change of an operation is in the journal before anything follows from it, and goes through `_change`, under one
lock. A caller that goes away in the middle of a call interrupts nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.operations import decide as deciding
from kybernate.agent.operations.attendance import LOG, Attendance
from kybernate.agent.operations.decide import Action, Attend, Finish, Interrupt, Observe, RollBack, Start, Undo, decide
from kybernate.agent.operations.events import Events, OperationEvents, is_noted, ordinal, title
from kybernate.agent.operations.executor import Executor
from kybernate.agent.operations.messages import operation_message
from kybernate.agent.operations.progress import Tracks
from kybernate.agent.operations.store import MOST_LIST, Store, Wanted
from kybernate.agent.operations.submission import AGENT_STOPPING_ADVICE, new_id, require_valid
from kybernate.agent.operations.watchers import Watchers
from kybernate.messages import agent_pb2
from kybernate.node.failure import Missing, Refused, Unavailable
from kybernate.verbs.model import Arguments, Limits, Observation, Operation, Report, Seen, State, Submission, Target

RETRY_SECONDS = 1.0  # between attempts to write to a journal that cannot be written
MOST_SLEEP_SECONDS = 60.0  # the clock may be set meanwhile
PRUNE_SECONDS = 3600.0

T = TypeVar("T")


class Engine:
    """Durable operations over an open journal whose schema has that of store.py.

    `limits` is asked again before each decision. `publish` gets every change as a message, `forget` the last message of
    an operation that is removed. `clock` returns seconds since 1970, and `boot` identifies this boot of the node.
    """

    def __init__(
        self,
        journal: Journal,
        executor: Executor,
        *,
        events: Events,
        publish: Callable[[agent_pb2.Operation], object] = lambda message: None,
        forget: Callable[[agent_pb2.Operation], object] = lambda message: None,
        limits: Callable[[], Limits] = Limits,
        clock: Callable[[], float] = time.time,
        boot: str = "",
    ) -> None:
        self._store = Store(journal, executor.verbs)
        self._executor = executor
        self._events = OperationEvents(events)
        self._publish, self._forget = publish, forget
        self._limits = limits
        self._clock = clock
        self._boot = boot
        self._operations: dict[str, Operation] = {}  # those that have not ended
        self._attendance = Attendance(executor, clock, wake=self.wake, heard=self._heard)
        self._watchers = Watchers()
        self._tracks = Tracks(clock, self._show_progress)
        self._unjournalled: dict[str, str] = {}  # ends that the journal could not take yet, in words
        self._found: set[str] = set()  # had begun when the agent started, and are not looked up yet
        self._wake = asyncio.Event()
        self._loaded = asyncio.Event()
        self._lock = asyncio.Lock()
        self._keys: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._calls: set[asyncio.Task[Any]] = set()
        self._last_id = ""
        self._pruned = 0.0
        self._stopping = False

    # ---- for callers

    async def submit(self, submission: Submission) -> Operation:
        """Take a request. Its operation is in the journal when this returns.

        The same key and request mean the same operation, also concurrently, after a restart and after its end. Raises
        Claimed, Invalid, Exhausted, Unavailable, JournalUnusable, Refused where it was to begin immediately, and what
        the executor has against it, such as Missing.
        """
        require_valid(submission)
        return await self._whole(self._submit(submission))

    async def get(self, id: str) -> Operation:
        """Return an operation as it is now. Raises Missing."""
        known = self._operations.get(id)
        return self._tracks.with_progress(known if known is not None else await self._store.get(id))

    async def list(self, wanted: Wanted = Wanted()) -> Sequence[Operation]:  # noqa: B008  # frozen
        """Return operations, newest first. Raises Missing for an unknown `before`."""
        return [
            self._tracks.with_progress(self._operations.get(operation.id, operation))
            for operation in await self._store.list(wanted)
        ]

    async def watch(self, id: str) -> AsyncIterator[Operation]:
        """Yield an operation as it is now and with each change; the last one is final. Raises Missing."""
        with self._watchers.follow(id) as watcher:
            watcher.put(await self.get(id))
            async for operation in watcher.read():
                yield operation

    async def cancel(self, id: str) -> Operation:
        """Undo an operation. One that has ended or is being undone stays as it is. Raises Missing."""
        return await self._whole(self._cancel(id))

    async def run(self) -> None:
        """Look up what the journal holds, then work until cancelled. The operations of shims continue after that."""
        await self._load()
        try:
            while True:
                await self._turn()
        finally:
            await self._attendance.close()
            self._tracks.close()

    async def drain(self, seconds: float = 0.0) -> Sequence[Operation]:
        """Take and begin no more operations; wait so long for those that run, and return those that still do.

        They are found again by the next start of the agent.
        """
        self._stopping = True
        busy = await self._attendance.settle(seconds)
        return [self._operations[id] for id in sorted(busy) if id in self._operations]

    async def ready(self) -> None:
        """Wait until all that the journal holds is known, which `run` sees to."""
        await self._loaded.wait()

    def wake(self) -> None:
        """Let the engine decide again: limits have changed, or time has passed otherwise than by the clock."""
        self._wake.set()

    # ---- taking and cancelling

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even if the caller goes away."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._called)
        return await asyncio.shield(task)

    def _called(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # it is the caller's, who may have gone

    async def _submit(self, submission: Submission) -> Operation:
        await self._loaded.wait()
        name = (submission.scope, submission.key)
        lock = self._keys.setdefault(name, asyncio.Lock()) if submission.key else asyncio.Lock()
        async with lock:
            if known := await self._store.find_key(submission):
                return self._tracks.with_progress(self._operations.get(known.id, known))
            if self._stopping:
                raise Unavailable(
                    "the agent is stopping", state="no operation was started", advice=AGENT_STOPPING_ADVICE
                )
            now, limits = self._clock(), self._limits()
            id = self._last_id = new_id(now, self._last_id)
            arguments, target = await self._resolved(id, submission.arguments)
            seconds = submission.seconds or limits.deadline
            operation = Operation(
                id=id,
                arguments=arguments,
                target=target,
                created=now,
                requester=submission.requester,
                key=submission.key,
                scope=submission.scope,
                labels=dict(submission.labels),
                deadline=now + seconds if seconds else None,
                revision=1,
            )
            return await self._add(operation, submission, limits)

    async def _resolved(self, id: str, wanted: Arguments) -> tuple[Arguments, Target]:
        """Return what a request comes to, and of what. Raises Failure."""
        arguments = await self._executor.meant(wanted)
        try:
            return arguments, await self._executor.resolve(id, arguments)
        except Missing:  # its container may have ended between the two looks: then it comes to another thing
            arguments = await self._executor.meant(wanted)
            if arguments == wanted:
                raise
            return arguments, await self._executor.resolve(id, arguments)

    async def _add(self, operation: Operation, submission: Submission, limits: Limits) -> Operation:
        async with self._lock:
            if submission.immediate:
                self._require_free(operation)
            added = await self._store.add(operation, submission, pending=limits.pending)
            if added.id != operation.id:
                return added
            self._operations[added.id] = added
            self._show(added)
        self.wake()
        return added

    def _require_free(self, wanted: Operation) -> None:
        """Raise Refused where another operation has, or waits for, what an operation would hold."""
        for other in self._operations.values():
            if set(wanted.target.holds) & set(other.target.holds):
                raise Refused(
                    f"the {wanted.verb} would wait for {title(other)} (operation {other.id})",
                    state="no operation was started",
                    advice="repeat it when that operation has ended",
                )

    async def _cancel(self, id: str) -> Operation:
        await self._loaded.wait()
        async with self._lock:
            operation = self._operations.get(id) or await self._store.get(id)
            if operation.state == State.PENDING:
                operation = await self._finish(Finish(operation, State.CANCELLED))
            elif operation.state == State.RUNNING:
                operation = await self._change(operation, state=State.CANCELLING, cause="requested")
        self.wake()
        return self._tracks.with_progress(operation)

    # ---- working

    async def _load(self) -> None:
        self._last_id = await self._store.last_id()
        for operation in reversed(await self._store.list(Wanted(limit=MOST_LIST))):
            self._publish(operation_message(operation))
        for operation in await self._store.unfinished():
            self._operations[operation.id] = operation
            if operation.state != State.PENDING:
                self._found.add(operation.id)
        self._loaded.set()

    async def _turn(self) -> None:
        """Act until there is nothing to do now, then wait until there may be."""
        self._wake.clear()
        try:
            await self._act()
            await self._prune()
            wait = deciding.next_look(self._operations.values(), self._attendance.seen, self._clock())
        except JournalUnusable as error:
            LOG.error("the journal cannot be written: %s", error)
            wait = RETRY_SECONDS
        try:
            async with asyncio.timeout(min(wait if wait is not None else MOST_SLEEP_SECONDS, MOST_SLEEP_SECONDS)):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _act(self) -> None:
        """Raises JournalUnusable after everything was done that needs no journal."""
        while actions := self._decided():
            failed: JournalUnusable | None = None
            for action in actions:
                try:
                    await self._perform(action)
                except JournalUnusable as error:
                    failed = failed or error
                    self._keep(action, error)
            if failed is not None:
                raise failed

    def _decided(self) -> Sequence[Action]:
        actions = decide(self._operations.values(), self._attendance.seen, self._limits(), self._clock())
        return [action for action in actions if not (self._stopping and isinstance(action, Start))]

    async def _perform(self, action: Action) -> None:
        async with self._lock:
            operation = action.operation
            if self._operations.get(operation.id) is not operation:
                return  # it has changed since: what is to be done now is decided again
            await self._note_what_was_found(operation)
            operation = self._operations[operation.id]
            match action:
                case Start():
                    await self._start(operation, again=action.again)
                case Attend():
                    self._attendance.attend(operation)
                case Observe():
                    self._attendance.observe(operation)
                case RollBack():
                    self._attendance.roll_back(operation)
                case Interrupt():
                    self._attendance.interrupt(operation)
                case Undo():
                    await self._change(operation, state=State.CANCELLING, cause=action.cause)
                case Finish():
                    await self._finish(replace(action, operation=operation))

    async def _note_what_was_found(self, operation: Operation) -> None:
        """Note once what the agent found of an operation that it had begun before it was started again."""
        seen = self._attendance.seen.get(operation.id)
        if operation.id not in self._found or seen is None or seen.seen in (Seen.LOOKING, Seen.UNREACHABLE):
            return
        words = f"the agent was started again and found it {seen.seen}" + (f": {seen.note}" if seen.note else "")
        await self._change(operation, note=words)
        self._found.discard(operation.id)
        await self._events.record("operation.recovered", "warning", operation, words)

    async def _start(self, operation: Operation, *, again: bool) -> None:
        now = self._clock()
        operation = await self._change(
            operation,
            state=State.RUNNING,
            started=operation.started or now,
            boot=self._boot,
            attempts=operation.attempts + 1,
            note=f"it was begun again, for the {ordinal(operation.attempts + 1)} time" if again else "",
        )
        self._tracks.begin(operation.id, now)
        self._attendance.attend(operation)
        await self._events.record("operation.started", "info", operation, f"{title(operation)} has begun")

    async def _finish(self, action: Finish) -> Operation:
        operation = action.operation
        steps = action.result.steps if action.result and action.result.steps else self._tracks.steps(operation.id)
        operation = await self._change(
            operation,
            state=action.state,
            ended=self._clock(),
            steps=steps,
            result=action.result,
            fault=action.fault,
            note="" if is_noted(operation, action.note) else action.note,
        )
        late = self._unjournalled.pop(operation.id, "")
        self._drop(operation.id)
        level = "error" if operation.state == State.FAILED else "info"
        why = f": {operation.fault.message}" if operation.fault else ""
        if operation.result and operation.result.source:
            why = f", from {operation.result.source}"
        elif operation.result and operation.result.frozen_ms:
            why = f", frozen for {operation.result.frozen_ms / 1000:.2f} s"
        await self._events.record(
            f"operation.{operation.state}", level, operation, f"{title(operation)} has ended as {operation.state}{why}"
        )
        if late:
            await self._events.record("operation.journalled", "warning", operation, f"{title(operation)}: {late}")
        return operation

    async def _change(self, operation: Operation, *, note: str = "", **changes: Any) -> Operation:
        """Journal a change, then let others know. Raises JournalUnusable; nothing has changed then."""
        remarks = self._attendance.remarks.get(operation.id, [])
        notes = (*operation.notes, *remarks, *([note] if note else ()))
        changed = replace(operation, revision=operation.revision + 1, notes=notes, **changes)
        await self._store.write(changed)
        self._attendance.remarks.pop(operation.id, None)
        if changed.final:
            del self._operations[changed.id]
        else:
            self._operations[changed.id] = changed
        self._show(changed)
        return changed

    def _keep(self, action: Action, error: JournalUnusable) -> None:
        """Say once that an operation has ended and the journal does not have it yet; it is written when it can be."""
        id = action.operation.id
        if not isinstance(action, Finish) or id in self._unjournalled:
            return
        words = f"it has ended as {action.state}, which could not be written to the journal immediately: {error}"
        self._unjournalled[id] = words
        LOG.error("%s: %s", title(action.operation), words)
        if operation := self._operations.get(id):
            self._show(replace(operation, notes=(*operation.notes, words)))

    def _drop(self, id: str) -> None:
        self._attendance.forget(id)
        self._tracks.drop(id)

    async def _prune(self) -> None:
        now, limits = self._clock(), self._limits()
        if now - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = now
        for operation in await self._store.prune(
            now, keep=limits.keep, keep_keys=limits.keep_keys, keep_of_one=limits.keep_of_one
        ):
            self._forget(operation_message(operation))

    # ---- letting others know

    def _heard(self, id: str, report: Report) -> None:
        if operation := self._operations.get(id):
            self._tracks.heard(operation, report)

    def _show_progress(self, id: str) -> None:
        if operation := self._operations.get(id):
            self._show(operation)

    def _show(self, operation: Operation) -> None:
        shown = self._tracks.with_progress(operation)
        self._watchers.put(shown)
        self._publish(operation_message(shown))


__all__ = ["Engine", "Events", "Observation", "Wanted"]

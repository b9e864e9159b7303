"""Keeps the models of a file as it says: what each needs next, done, with room on the GPUs where it needs some.

Programs that start from the beginning load one after the other; those that come back from templates do so side by side
where there is room. Both claim it first; without a request, they wait for models that have some.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from aiohttp import ClientSession

from kybernate.client import AgentRefused, OperationFailed
from kybernate.client.asynchronous import AsyncAgent
from kybernate.node.failure import Failure, Missing, Refused, Unavailable
from kybernate.store.errors import ImageDamaged
from kybernate.up import probing
from kybernate.up.lifecycle import Cause, Done, Seen, Step, after_failed_restore, cause_of, decide, failures_after
from kybernate.up.models_file import Entry, ModelsFile
from kybernate.up.pods import Pods, Running
from kybernate.up.room import Holder, Room

POLL_SECONDS: Final = 1.0  # between two looks at what runs
TEMPLATE_SECONDS: Final = 600.0
RESTORES: Final = 2  # at one time
SUSPENDED: Final = ("suspended", "partly suspended", "suspending")
TEMPLATE_LABEL: Final = "kybernate.io/up"  # of a template: its project
STARTS: Final = (Step.START, Step.RESTORE)  # take room
REST: Final = (Step.NONE, Step.WAIT, Step.PARKED)
Say = Callable[[str, str], None]  # a model's name, and a sentence about it


@dataclass
class Kept:
    """A model, and what was done for it. `waited` says that a request waits for it: it then stays awake."""

    entry: Entry
    done: Done = field(default_factory=Done)
    step: Step = Step.NONE
    problem: str = ""
    ended: float = 0.0
    image: bool = False
    template: bool = False
    address: str = Running.address
    vram: int | None = None  # bytes that it has on each of its GPUs, as far as known
    waited: int = 0
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def works(self) -> bool:
        return self.task is not None and not self.task.done()


class Keeper:
    """Keeps the models of a file."""

    def __init__(
        self, file: ModelsFile, pods: Pods, agent: AsyncAgent, session: ClientSession, say: Say, room: Room
    ) -> None:
        self._pods, self._agent, self._session, self._say, self.room = pods, agent, session, say, room
        self.project = file.project
        self.models = {entry.name: Kept(entry) for entry in file.models}
        self.settled: Callable[[str], object] = lambda name: None  # is called when a model has become ready, or is not
        self.slept: Callable[[str], object] = lambda name: None  # is called when a model was suspended here
        self.woke: Callable[[str], object] = lambda name: None  # is called when a model came back that stays awake
        self.idle: Callable[[str], float] = lambda name: 0.0  # seconds for which a model has slept
        self._loading, self._restoring = asyncio.Lock(), asyncio.Semaphore(RESTORES)
        self._look = asyncio.Event()
        self._problem = ""

    def change(self, file: ModelsFile) -> None:
        """Keep another file's models; those that are as before are not touched."""
        before = self.models
        self.models = {}
        for entry in file.models:
            kept = before.get(entry.name)
            if kept is not None and kept.entry.digest == entry.digest:
                kept.entry = entry
                self.models[entry.name] = kept
            else:
                self.models[entry.name] = Kept(entry)
        for name, kept in before.items():
            if self.models.get(name) is not kept and kept.task is not None:
                kept.task.cancel()
        self.look()

    def look(self) -> None:
        """Look at all models now."""
        self._look.set()

    async def look_at(self, name: str) -> None:
        """Look at one model now. Raises Missing and Unavailable."""
        kept = self.kept(name)
        if not kept.works:
            await self._next(kept, (await asyncio.to_thread(self._pods.list)).get(kept.entry.name))

    async def run(self) -> None:
        """Keep the models, without an end."""
        try:
            while True:
                self._look.clear()
                await self.turn()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._look.wait()
        finally:
            tasks = [kept.task for kept in self.models.values() if kept.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def turn(self) -> None:
        """Look at all models once, and begin what each needs."""
        try:
            await self._turn()
        except Failure as failure:  # containerd or the agent
            if str(failure) != self._problem:
                self._say("", f"{failure}: tried again until it works" + f" ({failure.advice})" * bool(failure.advice))
            self._problem = str(failure)
        else:
            self._problem = ""

    async def _turn(self) -> None:
        running = await asyncio.to_thread(self._pods.list)
        await self.room.measure()
        for one in running.values():
            await asyncio.to_thread(self._pods.rotate, one)
        for name in running.keys() - self.models.keys():
            self._say(name, "is no longer in the file: its container is removed")
            await asyncio.to_thread(self._pods.remove, running[name])
        for kept in sorted(self.models.values(), key=lambda one: (-one.waited, -one.entry.priority)):
            if kept.works:
                continue
            if kept.task is not None and not kept.task.cancelled() and (error := kept.task.exception()) is not None:
                raise error
            after = kept.entry.disk_after
            if after and kept.template and kept.done.settled and self.idle(kept.entry.name) >= after:
                kept.done = Done(parked=True)
                self.settled(kept.entry.name)
            if await self._next(kept, running.get(kept.entry.name)) not in REST:
                kept.task = asyncio.create_task(self._keep(kept))

    # -- what others ask for

    def kept(self, name: str) -> Kept:
        """Return a model by its name or another one of its names. Raises Missing."""
        for kept in self.models.values():
            if name in kept.entry.names:
                return kept
        raise Missing(f"no model is called {name}", advice=f"the models are {', '.join(sorted(self.models))}")

    @asynccontextmanager
    async def brought_up(self, name: str) -> AsyncIterator[Kept]:
        """Wait until a model is ready, with its program started where it is not; it stays so while the block runs.

        Raises Unavailable where it cannot start.
        """
        kept = self.kept(name)
        kept.waited += 1
        try:
            if kept.done.parked:
                kept.done, kept.step = replace(kept.done, parked=False), Step.NONE
            if kept.done.short and kept.step is Step.WAIT:  # others leave for it now
                kept.done, kept.step = replace(kept.done, failures=0), Step.NONE
            await self._until(kept, lambda: kept.done.settled)
            yield kept
        finally:
            kept.waited -= 1

    async def park(self, name: str) -> None:
        """End a model's program: its template stays, from which it comes back. Raises Missing, Refused."""
        kept = self.kept(name)
        if not kept.template:
            raise Refused(f"{name} has no template to come back from", state="it stays as it is")
        if kept.waited:
            raise Refused(f"a request waits for {name}", state="it stays as it is")
        kept.done = Done(parked=True)
        self.settled(name)
        await self._until(kept, lambda: kept.step is Step.PARKED)

    async def restart(self, name: str, *, fresh: bool = False) -> None:
        """End a model's program and start it again, from its template, or `fresh` from the beginning with another one.

        Raises Missing, Refused and Unavailable.
        """
        kept = self.kept(name)
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.gather(kept.task, return_exceptions=True)
        kept.done, kept.problem = Done(), ""
        self.settled(name)
        if (there := (await asyncio.to_thread(self._pods.list)).get(name)) is not None:
            await asyncio.to_thread(self._pods.remove, there)
        if fresh and kept.template:
            await self._remove_template(kept)
        self.look()
        await self._until(kept, lambda: kept.done.settled)

    async def _until(self, kept: Kept, holds: Callable[[], bool]) -> None:
        """Wait for a model; the first end of its program is waited out. Raises Unavailable where it fails again."""
        self.look()
        while not holds():
            if kept.step is Step.WAIT and kept.done.failures > 1:
                raise Unavailable(f"{kept.entry.name} does not start: {kept.problem}", state="it is tried again")
            kept.moved.clear()
            await kept.moved.wait()

    # -- one model

    async def _keep(self, kept: Kept) -> None:
        """Do a model's steps, one after the other, until it is ready or has to wait."""
        entry = kept.entry
        try:
            step = await self._prepared(kept)
            if step in (*REST, Step.PULL):
                return
            restores = step is Step.RESTORE or (kept.template and not kept.done.stale)
            asleep = step not in STARTS and await self._is_suspended(entry)
            has_it = step not in STARTS and not (asleep and not kept.template)
            async with (
                self._restoring if restores else self._loading,
                self.room.taken(
                    entry.name,
                    entry.devices,
                    0 if asleep and has_it else self._needed(kept, step),
                    seconds=entry.start_timeout,
                    why_not=lambda in_way: self._why_not(kept, in_way),
                    has_it=has_it,
                ) as why,
            ):
                if why:
                    kept.problem = why
                    return  # it stays as it is until there is room, or it is asked
                while step not in REST:
                    there = (await asyncio.to_thread(self._pods.list)).get(entry.name)
                    step = await self._next(kept, there)
                    if step in REST or (has_it and step in STARTS) or not await self._carry_out(step, kept, there):
                        return
        except Failure as failure:
            self._note_problem(kept, str(failure))
            kept.moved.set()

    def _needed(self, kept: Kept, step: Step) -> int | None:
        """Return the bytes that a model needs on each of its GPUs; None where all others are to leave for it.

        A program that ended while it loaded may have found no memory, and says so in words of its own, if at all.
        """
        return None if kept.done.short or (step is Step.START and kept.done.failures) else kept.vram

    def _why_not(self, kept: Kept, in_way: Sequence[Holder]) -> str:
        """Return why a model does not wait for others to leave; one that is asked always does."""
        if kept.waited:
            return ""
        if any(one.waited for one in self.models.values() if one is not kept):
            return "waits for room: others are asked"
        for one in in_way:
            if one.busy or one.priority > kept.entry.priority:
                return f"waits for room: {one.name} has requests, or a higher priority"
        return ""

    async def _prepared(self, kept: Kept) -> Step:
        """Get a model's image and remove what is left of its pod; return the step after that."""
        while True:
            there = (await asyncio.to_thread(self._pods.list)).get(kept.entry.name)
            step = await self._next(kept, there)
            if step not in (Step.PULL, Step.REMOVE) or not await self._carry_out(step, kept, there):
                return step

    async def _next(self, kept: Kept, there: Running | None) -> Step:
        """Return a model's next step."""
        entry = kept.entry
        seen = await self._seen(kept, there)
        after = decide(seen, kept.done, time.time(), warm_up=entry.warm_up is not None, template=entry.template)
        if after.step is not kept.step:
            kept.step = after.step
            if after.step not in (Step.NONE, Step.REMOVE):
                self._say(entry.name, after.step)
        kept.moved.set()
        return after.step

    async def _carry_out(self, step: Step, kept: Kept, there: Running | None) -> bool:
        """Do a step; return whether it was done."""
        try:
            await self._do(step, kept, there)
        except Failure as failure:
            advice = f" ({failure.advice})" if failure.advice else ""
            if step is Step.RESTORE:
                await self._note_failed_restore(kept, failure)
            else:
                self._note_problem(kept, f"{step} failed: {failure}{advice}")
                self._note_failure(step, kept)
            kept.moved.set()
            return False
        kept.problem = ""
        return True

    async def _note_failed_restore(self, kept: Kept, failure: Failure) -> None:
        """Note what a failed restore means: a template is kept for as long as it may come back here."""
        entry, said, before = kept.entry, str(failure), kept.done.unexplained
        with suppress(Failure):
            await self.room.measure()
        away, short = isinstance(failure, Unavailable), self.room.short(entry.devices, kept.vram)
        cause = cause_of(said, away=away, short=short)
        if cause is Cause.UNKNOWN:
            cause = cause_of(said, damaged=await self._is_damaged(kept), before=before)
        what = "does not come back here, and starts from zero"
        if cause is not Cause.TEMPLATE:
            what = "did not come back, which is tried again with the same template"
        self._note_problem(kept, f"{what}: {said}")
        kept.done = after_failed_restore(kept.done, cause)
        if not kept.done.stale:
            kept.ended = time.time()  # from when it pauses

    async def _is_damaged(self, kept: Kept) -> bool:
        """Return whether the agent finds that a model's template is not as it was written."""
        name = f"{self.project}/{self._template(kept.entry)}"
        try:
            await (await self._agent.verify_image(name, deadline=TEMPLATE_SECONDS)).result()
        except OperationFailed as failure:
            return failure.type == ImageDamaged.__name__
        except Failure:
            return False
        return False

    def _note_problem(self, kept: Kept, problem: str) -> None:
        if kept.problem != problem:
            kept.problem = problem
            self._say(kept.entry.name, problem)

    async def _seen(self, kept: Kept, there: Running | None) -> Seen:
        entry = kept.entry
        if there is not None:
            kept.address = there.address
        if there is not None and not there.running and there.ended > kept.ended and not kept.done.parked:
            kept.ended = there.ended
            failures = failures_after(kept.done, there.started, there.ended)
            kept.done = replace(kept.done, healthy=False, warmed=False, settled=False, failures=failures)
            self.settled(entry.name)
            reason = f": {there.reason}" if there.reason else ""
            self._note_problem(kept, f"its program has ended with status {there.exit_code}{reason}")
        if there is None and kept.done.settled:  # its pod was removed by another program
            kept.done = Done(failures=kept.done.failures)
            self.settled(entry.name)
        if not kept.image:
            kept.image = await asyncio.to_thread(self._pods.has_image, entry)
        if entry.template and not kept.template:
            await self._look_for_template(kept)
        return Seen(
            image=kept.image,
            pod=there is not None,
            same=there is not None and there.digest == entry.digest,
            running=there is not None and there.running,
            started=there.started if there else 0.0,
            ended=kept.ended,
            template=entry.template and kept.template,
        )

    async def _do(self, step: Step, kept: Kept, there: Running | None) -> None:
        entry = kept.entry
        match step:
            case Step.PULL:
                await asyncio.to_thread(self._pods.pull, entry)
            case Step.REMOVE if there is not None:
                await asyncio.to_thread(self._pods.remove, there)
                kept.done = replace(kept.done, healthy=False, warmed=False, settled=False)
            case Step.START:
                kept.began = time.monotonic()
                await asyncio.to_thread(self._pods.start, entry)
            case Step.RESTORE:
                kept.began = time.monotonic()
                await asyncio.to_thread(self._pods.start, entry, self._template(entry))
                kept.done = replace(kept.done, unexplained=0, short=False)
                self._say(entry.name, "came back from its template, without loading")
            case Step.AWAIT:
                kept.done = replace(kept.done, healthy=await self._healthy(kept))
            case Step.WARM:
                await probing.warm_up(self._session, entry, kept.address)
                kept.done = replace(kept.done, warmed=True)
            case Step.TEMPLATE:
                if kept.done.stale:
                    await self._remove_template(kept)
                operation = await self._agent.checkpoint(
                    self._pod_name(entry),
                    self._template(entry),
                    deadline=TEMPLATE_SECONDS,
                    labels={TEMPLATE_LABEL: self.project},
                    key=f"up-{self._template(entry)}-{there.container if there else ''}",  # a retry joins what runs
                )
                await operation.result()
                kept.done = replace(kept.done, stale=False)
            case Step.SLEEP:
                if not kept.waited:
                    await self._settle(kept)
                else:
                    (self.slept if await self._is_suspended(entry) else self.woke)(entry.name)
                self._ready(kept)

    def _ready(self, kept: Kept) -> None:
        """Note that a model can be asked."""
        entry = kept.entry
        kept.done = replace(kept.done, settled=True)
        kept.step = Step.NONE
        asleep = "" if kept.waited else ", suspended until it is asked"
        self._say(
            entry.name,
            f"ready at http://{kept.address}:{entry.port} after {time.monotonic() - kept.began:.1f} s{asleep}",
        )
        self.settled(entry.name)

    def _note_failure(self, step: Step, kept: Kept) -> None:
        """Note what a failed step means for the next ones."""
        done, now = kept.done, time.time()
        if step is Step.TEMPLATE:
            kept.done = replace(done, template_failed=True)
        elif step is Step.SLEEP:
            self._ready(kept)  # it stays awake; the proxy suspends it when it is idle
        elif step is Step.WARM:
            kept.done = replace(done, warmed=True)
        elif step in (Step.START, Step.AWAIT):
            kept.image = False
            kept.done, kept.ended = replace(done, failures=done.failures + 1), now

    async def _healthy(self, kept: Kept) -> bool:
        """Return True when the program answers its health check, False when it has ended. Raises Unavailable."""
        entry = kept.entry
        if await self._is_suspended(entry):  # by an earlier `kybernate up`, and so it was healthy
            if not kept.template:
                await (await self._agent.wake(self._pod_name(entry))).result()
            return True

        async def runs() -> bool:
            there = (await asyncio.to_thread(self._pods.list)).get(entry.name)
            return there is not None and there.running

        return await probing.until_healthy(self._session, entry, kept.address, runs)

    async def _settle(self, kept: Kept) -> None:
        """Suspend a model's GPU memory; a program that has none is ready as it is."""
        container = await self._agent.container(self._pod_name(kept.entry))
        if container.gpu == "attached":
            result = await (await self._agent.suspend(self._pod_name(kept.entry))).result()
            self.slept(kept.entry.name)
            kept.vram = result.vram_bytes // max(1, len(self.room.of(kept.entry.devices))) or kept.vram

    async def _is_suspended(self, entry: Entry) -> bool:
        try:
            return (await self._agent.container(self._pod_name(entry))).gpu in SUSPENDED
        except AgentRefused:
            return False  # it has not seen the container yet

    async def _look_for_template(self, kept: Kept) -> None:
        try:
            image = await self._agent.image(f"{self.project}/{self._template(kept.entry)}")
        except AgentRefused:
            return
        kept.template = True
        kept.vram = image.vram_bytes // max(1, len(self.room.of(kept.entry.devices)))

    async def _remove_template(self, kept: Kept) -> None:
        if kept.template:
            await (await self._agent.delete_image(f"{self.project}/{self._template(kept.entry)}", force=True)).result()
        kept.template = False

    def _template(self, entry: Entry) -> str:
        return f"{entry.name}-{entry.digest}"

    def _pod_name(self, entry: Entry) -> str:
        return f"{self.project}/{entry.name}"

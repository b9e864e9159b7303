"""Keeps the models of a file as it says: what each needs next, done, with room on the GPUs where it needs some.

Programs that start from the beginning load one after the other; those that come back from templates do so side by side
where there is room. Both claim it first; without a request, they wait for models that have some. A model with a seat
waits for its seat's turn alone, where the agent has seats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Final

from aiohttp import ClientSession

from kybernate.client.asynchronous import AsyncAgent
from kybernate.node.failure import Failure, Missing, Refused, Unavailable
from kybernate.up.lifecycle import Done, Seen, Step, decide, failures_after
from kybernate.up.models_file import ModelsFile
from kybernate.up.pods import Pods, Running
from kybernate.up.room import Holder, Room
from kybernate.up.steps import Kept, Say, Steps

POLL_SECONDS: Final = 1.0  # between two looks at what runs
RESTORES: Final = 2  # at one time
STARTS: Final = (Step.START, Step.RESTORE)  # take room
REST: Final = (Step.NONE, Step.WAIT, Step.PARKED)


class Keeper:
    """Keeps the models of a file."""

    def __init__(
        self, file: ModelsFile, pods: Pods, agent: AsyncAgent, session: ClientSession, say: Say, room: Room
    ) -> None:
        self._pods, self._say, self.room = pods, say, room
        self.steps = Steps(file.project, pods, agent, session, say, room)
        self.models = {entry.name: Kept(entry) for entry in file.models}
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
        await self._remove([one for name, one in running.items() if name not in self.models])
        for kept in sorted(self.models.values(), key=lambda one: (-one.waited, -one.entry.priority)):
            with suppress(Missing):  # it has ended meanwhile
                await self.steps.rank(kept, running.get(kept.entry.name))
            if kept.works:
                continue
            if kept.task is not None and not kept.task.cancelled() and (error := kept.task.exception()) is not None:
                raise error
            after = kept.entry.disk_after
            if after and kept.template and kept.done.settled and self.idle(kept.entry.name) >= after:
                kept.done = Done(parked=True)
                self.steps.settled(kept.entry.name)
            if await self._next(kept, running.get(kept.entry.name)) not in REST:
                kept.task = asyncio.create_task(self._keep(kept))

    async def _remove(self, others: Sequence[Running]) -> None:
        """Remove models that the file no longer has, side by side: a program may take its time to end."""
        for one in others:
            self._say(one.model, "is no longer in the file: its container is removed")
        await asyncio.gather(*(asyncio.to_thread(self._pods.remove, one) for one in others))

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
        """End a model's program: its template stays, from which it comes back. One that is being made is waited for.

        Raises Missing, Refused, and Unavailable where the model cannot start.
        """
        kept = self.kept(name)
        if kept.entry.template and not kept.template:
            await self._until(kept, lambda: kept.done.settled or kept.done.short)
        if not kept.template:
            raise Refused(f"{name} has no template to come back from", state="it stays as it is")
        if kept.waited:
            raise Refused(f"a request waits for {name}", state="it stays as it is")
        kept.done = Done(parked=True)
        self.steps.settled(name)
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
        kept.task = asyncio.create_task(self._clear(kept, fresh=fresh))  # no turn takes what still runs for started
        self.steps.settled(kept.entry.name)
        try:
            await kept.task
        finally:
            kept.task = None
        await self._until(kept, lambda: kept.done.settled)

    async def _clear(self, kept: Kept, *, fresh: bool) -> None:
        """Remove a model's pod, and its template where it is to start from the beginning."""
        if (there := (await asyncio.to_thread(self._pods.list)).get(kept.entry.name)) is not None:
            await asyncio.to_thread(self._pods.remove, there)
        if fresh:
            await self.steps.remove_template(kept)

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
            asleep = step not in STARTS and await self.steps.is_suspended(entry)
            has_it = step not in STARTS and not (asleep and not kept.template)
            devices = self.room.decided_here(entry.devices, entry.seat)
            turn = self._restoring if restores else self._loading
            async with (
                nullcontext() if entry.seat and self.room.seats() else turn,
                self.room.taken(
                    entry.name,
                    devices,
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
                    if step in REST or (has_it and step in STARTS) or not await self.steps.carry_out(step, kept, there):
                        return
        except Failure as failure:
            self.steps.note_problem(kept, str(failure))
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
            if step not in (Step.PULL, Step.REMOVE) or not await self.steps.carry_out(step, kept, there):
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

    async def _seen(self, kept: Kept, there: Running | None) -> Seen:
        entry = kept.entry
        kept.container = there.container if there is not None else ""
        if there is not None:
            kept.address = there.address
        if there is not None and not there.running and there.ended > kept.ended and not kept.done.parked:
            kept.ended = there.ended
            failures = failures_after(kept.done, there.started, there.ended)
            kept.done = replace(kept.done, healthy=False, warmed=False, settled=False, failures=failures)
            self.steps.settled(entry.name)
            reason = f": {there.reason}" if there.reason else ""
            self.steps.note_problem(kept, f"its program has ended with status {there.exit_code}{reason}")
        if there is None and kept.done.settled:  # its pod was removed by another program
            kept.done = Done(failures=kept.done.failures)
            self.steps.settled(entry.name)
        if not kept.image:
            kept.image = await asyncio.to_thread(self._pods.has_image, entry)
        if entry.template and not kept.template:
            await self.steps.look_for_template(kept)
        return Seen(
            image=kept.image,
            pod=there is not None,
            same=there is not None and there.digest == entry.digest,
            running=there is not None and there.running,
            started=there.started if there else 0.0,
            ended=kept.ended,
            template=entry.template and kept.template,
        )

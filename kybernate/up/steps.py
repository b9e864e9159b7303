"""The steps of a model as containerd and the agent do them, and what one that fails means for the next.

lifecycle.py decides which step is next, keeper.py when it begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from aiohttp import ClientSession

from kybernate.client import AgentRefused, OperationFailed
from kybernate.client.asynchronous import AsyncAgent
from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Failure, Unavailable
from kybernate.store.errors import ImageDamaged
from kybernate.up import probing
from kybernate.up.lifecycle import Cause, Done, Step, after_failed_restore, cause_of
from kybernate.up.models_file import Entry
from kybernate.up.pods import Pods, Running
from kybernate.up.room import Room

TEMPLATE_SECONDS: Final = 600.0
SUSPENDED: Final = (Container.SUSPENDED, Container.SUSPENDING, Container.PARKING)
TEMPLATE_LABEL: Final = "kybernate.io/up"  # of a template: its project
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
    container: str = ""  # id; empty while there is none
    ranked: tuple[str, int] = ("", 0)  # the container whose seat has this priority
    vram: int | None = None  # bytes that it has on each of its GPUs, as far as known
    waited: int = 0
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def works(self) -> bool:
        return self.task is not None and not self.task.done()


class Steps:
    """The steps of a project's models. `settled`, `slept` and `woke` are called with the name of a model."""

    def __init__(
        self, project: str, pods: Pods, agent: AsyncAgent, session: ClientSession, say: Say, room: Room
    ) -> None:
        self.project = project
        self.settled: Callable[[str], object] = lambda name: None  # it has become ready, or is not any more
        self.slept: Callable[[str], object] = lambda name: None  # it was suspended here
        self.woke: Callable[[str], object] = lambda name: None  # it came back and stays awake
        self._pods, self._agent, self._session, self._say, self._room = pods, agent, session, say, room

    async def carry_out(self, step: Step, kept: Kept, there: Running | None) -> bool:
        """Do a step; return whether it was done."""
        try:
            await self._do(step, kept, there)
        except Failure as failure:
            advice = f" ({failure.advice})" if failure.advice else ""
            if step is Step.RESTORE:
                await self._note_failed_restore(kept, failure)
            else:
                self.note_problem(kept, f"{step} failed: {failure}{advice}")
                self._note_failure(step, kept)
            kept.moved.set()
            return False
        kept.problem = ""
        return True

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
                await asyncio.to_thread(self._pods.start, entry, template_of(entry))
                kept.done = replace(kept.done, unexplained=0, short=False)
                self._say(entry.name, "came back from its template, without loading")
            case Step.AWAIT:
                kept.done = replace(kept.done, healthy=await self._healthy(kept))
            case Step.WARM:
                await probing.warm_up(self._session, entry, kept.address)
                kept.done = replace(kept.done, warmed=True)
            case Step.TEMPLATE:
                await self._save(kept, there)
            case Step.SLEEP:
                if not kept.waited:
                    await self._suspend(kept)
                else:
                    (self.slept if await self.is_suspended(entry) else self.woke)(entry.name)
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

    async def _healthy(self, kept: Kept) -> bool:
        """Return True when the program answers its health check, False when it has ended. Raises Unavailable."""
        entry = kept.entry
        if await self.is_suspended(entry):  # by an earlier `kybernate up`, and so it was healthy
            if not kept.template:
                await (await self._agent.wake(self._pod_name(entry))).result()
            return True

        async def runs() -> bool:
            there = (await asyncio.to_thread(self._pods.list)).get(entry.name)
            return there is not None and there.running

        return await probing.until_healthy(self._session, entry, kept.address, runs)

    async def _suspend(self, kept: Kept) -> None:
        """Suspend a model's GPU memory; a program that has none is ready as it is."""
        container = await self._agent.container(self._pod_name(kept.entry))
        if container.gpu == Container.ATTACHED:
            result = await (await self._agent.suspend(self._pod_name(kept.entry))).result()
            self.slept(kept.entry.name)
            kept.vram = result.vram_bytes // max(1, len(self._room.of(kept.entry.devices))) or kept.vram

    async def is_suspended(self, entry: Entry) -> bool:
        """Return whether a model's GPU memory is in host memory. Raises Failure."""
        try:
            return (await self._agent.container(self._pod_name(entry))).gpu in SUSPENDED
        except AgentRefused:
            return False  # it has not seen the container yet

    async def rank(self, kept: Kept, there: Running | None) -> None:
        """Have the arbiter know a model's priority, which may have changed since its program started."""
        entry, container = kept.entry, there.container if there is not None else ""
        if entry.seat and there is not None and container and kept.ranked != (container, entry.priority):
            await asyncio.to_thread(self._pods.prioritize, there, entry.priority)
            kept.ranked = container, entry.priority

    # -- templates

    async def look_for_template(self, kept: Kept) -> None:
        """Note a model's template and the size of its memory, where the agent has one. Raises Failure."""
        try:
            image = await self._agent.image(self._image_name(kept.entry))
        except AgentRefused:
            return
        kept.template = True
        kept.vram = image.vram_bytes // max(1, len(self._room.of(kept.entry.devices)))

    async def remove_template(self, kept: Kept) -> None:
        """Remove a model's template, where it has one. Raises Failure."""
        if kept.template:
            await (await self._agent.delete_image(self._image_name(kept.entry), force=True)).result()
        kept.template = False

    async def _save(self, kept: Kept, there: Running | None) -> None:
        entry = kept.entry
        if kept.done.stale:
            await self.remove_template(kept)
        operation = await self._agent.checkpoint(
            self._pod_name(entry),
            template_of(entry),
            deadline=TEMPLATE_SECONDS,
            labels={TEMPLATE_LABEL: self.project},
            key=f"up-{template_of(entry)}-{there.container if there else ''}",  # a retry joins what runs
        )
        await operation.result()
        kept.done = replace(kept.done, stale=False)

    # -- what failed

    def note_problem(self, kept: Kept, problem: str) -> None:
        """Say a model's problem, once."""
        if kept.problem != problem:
            kept.problem = problem
            self._say(kept.entry.name, problem)

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

    async def _note_failed_restore(self, kept: Kept, failure: Failure) -> None:
        """Note what a failed restore means: a template is kept for as long as it may come back here."""
        said, before = str(failure), kept.done.unexplained
        with suppress(Failure):
            await self._room.measure()
        away, short = isinstance(failure, Unavailable), self._room.short(kept.entry.devices, kept.vram)
        cause = cause_of(said, away=away, short=short)
        if cause is Cause.UNKNOWN:
            cause = cause_of(said, damaged=await self._is_damaged(kept), before=before)
        what = "does not come back here, and starts from zero"
        if cause is not Cause.TEMPLATE:
            what = "did not come back, which is tried again with the same template"
        self.note_problem(kept, f"{what}: {said}")
        kept.done = after_failed_restore(kept.done, cause)
        if not kept.done.stale:
            kept.ended = time.time()  # from when it pauses

    async def _is_damaged(self, kept: Kept) -> bool:
        """Return whether the agent finds that a model's template is not as it was written."""
        try:
            await (await self._agent.verify_image(self._image_name(kept.entry), deadline=TEMPLATE_SECONDS)).result()
        except OperationFailed as failure:
            return failure.type == ImageDamaged.__name__
        except Failure:
            return False
        return False

    def _image_name(self, entry: Entry) -> str:
        return f"{self.project}/{template_of(entry)}"

    def _pod_name(self, entry: Entry) -> str:
        return f"{self.project}/{entry.name}"


def template_of(entry: Entry) -> str:
    """Return the name of a model's template: another one for each shape of its container."""
    return f"{entry.name}-{entry.digest}"

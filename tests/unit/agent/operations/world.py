"""A node that is simulated: containers with shims, files that the agent writes, a disk that is full, crashes.

The world outlives the agent. What truly became of each operation is in `fates`; the executor sees of it what a real one
would: a shim's memory, which ends with its container, and files, which stay.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kybernate.agent.journal import Journal
from kybernate.agent.operations.executor import Heard
from kybernate.node.failure import Failure, Missing
from kybernate.node.shim import ShimRefused
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown, fault_of
from kybernate.verbs.every import VERBS
from kybernate.verbs.export import Export
from kybernate.verbs.model import Arguments, Observation, Operation, Report, Result, Seen, Target
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.swap import Swap

Fate = Literal["working", "succeeded", "failed", "cancelled", "died"]
T = TypeVar("T")


@dataclass
class Crash:
    """Stops the agent dead at the n-th of its writes and effects from now on: from there nothing of it happens."""

    after: int = 0  # 0 means never
    dead: bool = False
    steps: int = 0  # of all agents so far

    async def point(self) -> None:
        """Pass a place where the agent may be killed."""
        self.steps += 1
        if self.after:
            self.after -= 1
            self.dead = self.dead or self.after == 0
        if self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class CrashingJournal(Journal):
    """A journal on a real file. The agent may be killed before and after each transaction, and the disk be full."""

    crash: Crash
    full: Callable[[], bool]

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        await self.crash.point()
        with self.transaction() as connection:
            changes = connection.total_changes
            result = work(connection)
            if self.full() and connection.total_changes != changes:
                raise sqlite3.OperationalError("database or disk is full")
        await self.crash.point()
        return result


@dataclass
class Shim:
    """What a container's shim remembers: the operations that it was asked for. It ends with its container."""

    memory: dict[str, Fate] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # to be undone

    @property
    def working(self) -> str:
        return next((id for id, fate in self.memory.items() if fate == "working"), "")


@dataclass
class World:
    """A node with the containers `a`, `b` and `c`."""

    shims: dict[str, Shim] = field(default_factory=lambda: {name: Shim() for name in "abc"})
    fates: dict[str, Fate] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)  # ids of checkpoints whose image is whole
    files: dict[str, Literal["half", "whole"]] = field(default_factory=dict)  # of exports, by id
    violations: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    boot: int = 1
    full: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, id: str, container: str) -> None:
        """A shim begins what it does not remember."""
        shim = self.shims[container]
        if shim.working:
            self.violations.append(f"{id} began on {container} during {shim.working}")
        if self.fates.get(id) in ("succeeded", "failed", "cancelled"):
            self.violations.append(f"{id} was begun again after it had {self.fates[id]}")
        self.begun.append(id)
        shim.memory[id] = self.fates[id] = "working"
        self.changed()

    def end(self, container: str, fate: Fate, *, image: bool) -> None:
        """The shim ends what it does."""
        shim = self.shims[container]
        id = shim.working
        if image and fate == "succeeded":
            self.images.add(id)
        shim.memory[id] = self.fates[id] = fate
        self.changed()

    def die(self, container: str) -> None:
        """The container ends, and with it what its shim knows. What is on the disk stays."""
        for id, fate in self.shims.pop(container).memory.items():
            if id not in self.images and fate in ("working", "succeeded", "failed", "cancelled"):
                self.fates[id] = "died"
        self.changed()

    def changed(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class SimulatedExecutor:
    """What an agent does in the world. It may be killed wherever it touches it."""

    verbs: Mapping[str, type[Arguments]] = VERBS

    def __init__(self, world: World, crash: Crash) -> None:
        self._world = world
        self._crash = crash
        self._stopped: set[str] = set()
        self.proceed: set[str] = set()  # exports that may be completed

    async def meant(self, arguments: Arguments) -> Arguments:
        return arguments

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        await self._crash.point()
        match arguments:
            case Checkpoint(name=name) | Suspend(name=name):
                self._require(name)
                return Target(container=name, title=name, holds=(name,), copies=("gpu 1",))
            case Swap(leaving=leaving, coming=coming):
                self._require(leaving)
                self._require(coming)
                return Target(container=leaving, other=coming, holds=(leaving, coming))
            case Export(image=image, path=path):
                return Target(image=image, writes=f"{path}-{id}", holds=(f"{path}-{id}",), copies=("disk 1",))
        raise AssertionError(arguments)

    def _require(self, name: str) -> None:
        if name not in self._world.shims:
            raise Missing(f"no container {name}")

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        await self._crash.point()
        if isinstance(operation.arguments, Export):
            return await self._export(operation, heard)
        name, id = operation.target.container, operation.id
        shim = self._world.shims.get(name)
        if shim is None:
            raise Missing(f"{name} has no processes")
        if id not in shim.memory:
            if id in self._stopped:
                raise OperationUndone("before it began")
            self._world.begin(id, name)
        heard(Report("dump", 1, 2))
        while shim.memory[id] == "working":
            if self._world.shims.get(name) is not shim:
                raise OutcomeUnknown("the connection was lost")
            await self._world.news.wait()
        await self._crash.point()
        return self._answer(shim.memory[id], id)

    def _answer(self, fate: Fate, id: str) -> Result:
        if fate == "cancelled":
            raise OperationUndone("undone")
        if fate == "failed":
            raise ShimRefused("the driver refuses", code="INTERNAL")
        return Result(path=id)

    async def _export(self, operation: Operation, heard: Heard) -> Result:
        id, world = operation.id, self._world
        if world.files.get(id) == "whole":
            raise Failure("the file exists")
        world.begun.append(id)
        world.files[id] = "half"
        world.fates[id] = "working"
        await self._crash.point()
        while id not in self.proceed and id not in self._stopped:
            await world.news.wait()
        await self._crash.point()
        if id in self._stopped:
            del world.files[id]
            world.fates[id] = "cancelled"
            raise OperationUndone("undone")
        world.files[id] = "whole"
        world.fates[id] = "succeeded"
        await self._crash.point()
        return Result(path=id)

    async def cancel(self, operation: Operation) -> None:
        await self._crash.point()
        self._stopped.add(operation.id)
        shim = self._world.shims.get(operation.target.container)
        if shim is not None and operation.id in shim.memory:
            shim.asked.add(operation.id)
        self._world.changed()

    async def observe(self, operation: Operation) -> Observation:
        await self._crash.point()
        if isinstance(operation.arguments, Export):
            seen = {"half": Seen.HALF_DONE, "whole": Seen.SUCCEEDED}.get(self._world.files.get(operation.id, ""))
            return Observation(
                seen or Seen.ABSENT, result=Result(path=operation.id) if seen == Seen.SUCCEEDED else None
            )
        if operation.id in self._world.images:
            return Observation(Seen.SUCCEEDED, "image", result=Result(path=operation.id))
        if operation.boot != str(self._world.boot):
            return Observation(Seen.FAILED, fault=fault_of(Failure("rebooted")))
        shim = self._world.shims.get(operation.target.container)
        if shim is None:
            return Observation(Seen.FAILED, fault=fault_of(Missing("gone")))
        fate = shim.memory.get(operation.id)
        if fate is None:
            return Observation(Seen.ABSENT)
        if fate == "failed":
            return Observation(Seen.FAILED, fault=fault_of(ShimRefused("the driver refuses", code="INTERNAL")))
        seen = {"working": Seen.AT_WORK, "succeeded": Seen.SUCCEEDED, "cancelled": Seen.CANCELLED}[fate]
        return Observation(seen, result=Result(path=operation.id) if seen == Seen.SUCCEEDED else None)

    async def roll_back(self, operation: Operation) -> str:
        await self._crash.point()
        self._world.files.pop(operation.id, None)
        self._world.fates.pop(operation.id, None)
        await self._crash.point()
        return "removed"


class Events:
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []
        self.messages: list[str] = []

    async def record(self, type: str, level: str, message: str, **fields: str) -> object:
        self.said.append((type, level, fields.get("operation", "")))
        self.messages.append(message)
        return None

"""A service and its clients on one thread and one clock: a seed decides every order, so that it repeats.

Each call of a client waits until chance lets it happen. A client may be killed while its call is on the way, which then
happens later or never; a call may time out in the same way. Lists come page by page, and change in between. The clock
jumps, backwards as well.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from kybernate.store.errors import ObjectMissing, StoreUnreachable
from kybernate.store.objects import MOST_BYTES, Stored
from kybernate.store.parts import WholeParts

T = TypeVar("T")
PAGE = 3  # names in a page of a list
MOST_CALLS = 20_000


class Killed(BaseException):
    """The process of a client has ended: what it would do next does not happen."""


@dataclass(eq=False)
class Call:
    """A call on its way. `answer` is None where no client waits for it any more."""

    client: Client
    words: str
    work: Callable[[], object]
    answer: asyncio.Future[Any]

    def happen(self) -> None:
        try:
            result = self.work()
        except ObjectMissing as error:
            if not self.answer.done():
                self.answer.set_exception(error)
        else:
            if not self.answer.done():
                self.answer.set_result(result)


@dataclass
class Service:
    """What all clients share: the objects, the clock, and the calls that are on their way."""

    contents: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    clock: float = 1e6
    calls: list[Call] = field(default_factory=list)
    sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)

    def content(self, name: str) -> bytes:
        if name not in self.contents:
            raise ObjectMissing(name)
        return self.contents[name][0]

    def names(self, prefix: str) -> list[str]:
        return [name for name in sorted(self.contents) if name.startswith(f"{prefix}/")]


class Client(WholeParts):
    """One process's connection to the service."""

    ranged = True
    lacks: set[str] = set()  # noqa: RUF012  # nothing

    def __init__(self, service: Service) -> None:
        self.service = service
        self.dead = False

    def kill(self) -> None:
        """End the process; what it has sent may still happen."""
        self.dead = True
        for call in self.service.calls:
            if call.client is self and not call.answer.done():
                call.answer.set_exception(Killed())

    async def _do(self, words: str, work: Callable[[], T]) -> T:
        if self.dead:
            raise Killed
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.service.calls.append(Call(self, words, work, answer))
        return await answer

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        kept = bytes(content)
        await self._do(f"put {name}", lambda: self._put(name, kept))

    def _put(self, name: str, content: bytes) -> None:
        self.service.contents[name] = (content, self.service.clock)

    async def copy(self, source: str, target: str) -> None:
        await self._do(f"copy {source} {target}", lambda: self._put(target, self.service.content(source)))

    async def create(self, name: str, content: bytes) -> bool:
        return await self._do(f"create {name}", lambda: self._create(name, content))

    def _create(self, name: str, content: bytes) -> bool:
        if absent := name not in self.service.contents:
            self._put(name, content)
        return absent

    async def folders(self, prefix: str) -> list[str]:
        def listed() -> list[str]:
            below = [name.removeprefix(f"{prefix}/") for name in self.service.names(prefix)]
            return sorted({name.partition("/")[0] for name in below if "/" in name})

        return await self._do(f"folders {prefix}", listed)

    async def get(self, name: str, *, most: int = MOST_BYTES) -> bytes:
        return await self._do(f"get {name}", lambda: self.service.content(name))

    async def get_range(self, name: str, start: int, length: int) -> bytes:
        return await self._do(f"get {name}", lambda: self.service.content(name)[start : start + length])

    async def head(self, name: str) -> Stored:
        return await self._do(f"head {name}", lambda: self._stored(name))

    def _stored(self, name: str) -> Stored:
        return Stored(name, len(self.service.content(name)), self.service.contents[name][1])

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        after = ""
        while True:
            page = await self._do(f"list {prefix} {after}", lambda after=after: self._page(prefix, after))  # type: ignore[misc]
            for found in page:
                yield found
            if len(page) < PAGE:
                return
            after = page[-1].name

    def _page(self, prefix: str, after: str) -> list[Stored]:
        return [self._stored(name) for name in self.service.names(prefix) if name > after][:PAGE]

    async def delete(self, names: Sequence[str]) -> None:
        gone = list(names)
        await self._do(f"delete {' '.join(gone)}", lambda: [self.service.contents.pop(name, None) for name in gone])


@dataclass
class Chances:
    """How often, for each call that happens, something else does."""

    jump: float = 0.1
    kill: float = 0.01
    time_out: float = 0.01
    jumps: Sequence[float] = (1.0, 60.0, 300.0, 400.0, 600.0, 1000.0, 6000.0, -1.0, -600.0, -6000.0)


class Simulation:
    """Clients of one service whose calls happen in an order that a seed decides.

    `look` is called after everything that happened; it raises where the service holds what must not be.
    """

    def __init__(self, seed: int, chances: Chances, look: Callable[[Service], None]) -> None:
        self.chance = random.Random(seed)
        self.service = Service()
        self._chances = chances
        self._look = look
        self._clients: dict[asyncio.Task[None], Client] = {}

    def client(self) -> Client:
        return Client(self.service)

    async def play(self, work: Sequence[tuple[Client, Coroutine[Any, Any, None]]]) -> None:
        """Let all of it happen, one call at a time, while time passes, clients die and calls time out."""
        self._clients = {asyncio.ensure_future(_until_killed(one)): client for client, one in work}
        while True:
            await _idle()
            running = [task for task in self._clients if not task.done()]
            if not running:
                break
            assert len(self.service.happened) < MOST_CALLS, "the clients do not come to an end"
            self._wake()
            await self._step()
        for task in self._clients:
            task.result()
        self.service.sleepers.clear()

    async def quietly(self, work: Coroutine[Any, Any, T]) -> T:
        """Let one piece of work happen without anything else."""
        task = asyncio.ensure_future(work)
        while True:
            await _idle()
            if task.done():
                return task.result()
            self._happen(0)

    async def _step(self) -> None:
        if not self.service.calls:
            assert self.service.sleepers, "the clients wait for each other"
            self.service.clock += 60.0
            return
        number = self.chance.randrange(len(self.service.calls))
        fate = self.chance.random()
        call = self.service.calls[number]
        if fate < self._chances.kill:
            call.client.kill()
        elif fate < self._chances.kill + self._chances.time_out:
            if not call.answer.done():
                call.answer.set_exception(StoreUnreachable("timed out"))
        else:
            self._happen(number)
        if self.chance.random() < self._chances.jump:
            self.service.clock += self.chance.choice(self._chances.jumps)

    def _happen(self, number: int) -> None:
        call = self.service.calls.pop(number)
        call.happen()
        self.service.happened.append(call.words)
        self._look(self.service)

    def _wake(self) -> None:
        for sleeper in [one for one in self.service.sleepers if one[0] <= self.service.clock]:
            self.service.sleepers.remove(sleeper)
            if not sleeper[1].done():
                sleeper[1].set_result(None)


async def _until_killed(work: Awaitable[None]) -> None:
    try:
        await work
    except Killed:
        return


REAL_SLEEP = asyncio.sleep


async def _idle() -> None:
    """Let every task run until it waits for a call."""
    loop: Any = asyncio.get_running_loop()
    await REAL_SLEEP(0)
    while loop._ready:  # the only way to know without waiting
        await REAL_SLEEP(0)


async def _in_line(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


@contextmanager
def repeatable(simulation: Simulation) -> Iterator[None]:
    """No threads, no time and no chance but the simulation's."""

    async def sleep(seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        simulation.service.sleepers.append((simulation.service.clock + seconds, woken))
        await woken

    chance = simulation.chance

    def some_uuid() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128))

    with (
        mock.patch("asyncio.to_thread", _in_line),
        mock.patch("asyncio.sleep", sleep),
        mock.patch("uuid.uuid4", some_uuid),
        mock.patch("os.urandom", chance.randbytes),
    ):
        yield

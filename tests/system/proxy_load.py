"""Requests at an even rate through a proxy, by a client that repeats as OpenAI's package does, and what became of each.

A request is repeated where it had no answer, or one that says so; it is `cut` where its answer had begun and did not
become whole: no client can repeat that. Nothing else can happen to it, or it hangs.

No request hangs because a machine is busy. The clock by which they are judged is the model itself, asked past
the proxy by one request after the other: a request hangs where neither it nor another one of its tally ends while the
model answers many times. How far the client was behind is in each tally, and judged nowhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

HANGS_SECONDS = 60.0  # at the least: longer than the kernel waits between two tries of anything
HANGS_ANSWERS = 200  # of the model, past the proxy, in the same time
LOOK_SECONDS = 0.1
MOST_SECONDS = (
    10  # of the rate, which a client has open: one that asks more of a machine that is behind measures itself
)
PIECES = 3  # of an answer
PAUSE = 0.03  # between them
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # before a request is repeated, where no answer says for how long


@dataclass(eq=False)
class Request:
    """One that has not ended; `last` is why it was repeated."""

    model: str
    number: int
    last: str = "nothing yet"

    def __str__(self) -> str:
        return f"{self.model} {self.number}, after {self.last}"


@dataclass
class Tally:
    """What became of the requests that began in some time: `repeats` by model and reason.

    `late`: by how many seconds a request was sent after its time, at the most. `unsent`: those that a machine which was
    behind was spared.
    """

    whole: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    repeats: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    late: float = 0.0
    unsent: int = 0
    open: dict[Request, asyncio.Task[None]] = field(default_factory=dict)
    ends: int = 0

    def add(self, other: Tally) -> None:
        """Add what became of the requests of another time, all of which have ended."""
        self.whole += other.whole
        self.cut += other.cut
        self.repeats += other.repeats
        self.wrong += other.wrong
        self.hung += other.hung
        self.late, self.unsent = max(self.late, other.late), self.unsent + other.unsent

    def __str__(self) -> str:
        repeats = ", ".join(f"{model} {reason}: {count}" for (model, reason), count in sorted(self.repeats.items()))
        return (
            f"whole {dict(self.whole)}, cut {dict(self.cut)}, repeated {{{repeats}}}, hung {len(self.hung)};"
            f" sent {self.late:.1f} s late at the most, {self.unsent} not sent"
        )


class Load:
    """Asks `url` for models, each so many times a second, and `model_url`, which is that of a model itself.

    `tally` is where requests count that begin from now on; `begin` takes a new one.
    """

    def __init__(self, url: str, rates: Mapping[str, float], model_url: str) -> None:
        self._url, self._rates, self._model_url = url, rates, model_url
        self.tally = Tally()
        self._tallies = [self.tally]
        self._ended = threading.Event()
        self._numbers = itertools.count(1)
        self._answers = 0  # of the model itself
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> Tally:
        """Count what begins from now on in a tally of its own."""
        self._tallies.append(tally := Tally())
        self.tally = tally
        return tally

    def complete(self, tally: Tally) -> None:
        """Return once all requests of a tally have ended, or hang: those are in it then, and given up."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._until_complete(tally), self._loop).result()

    def run(self) -> None:
        asyncio.run(self._run())

    def end(self) -> None:
        self._ended.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as client:
            asking = self._loop.create_task(self._ask_the_model(client))
            await asyncio.gather(*(self._paced(client, model, rate) for model, rate in self._rates.items()))
            for tally in self._tallies:
                await self._until_complete(tally)
            asking.cancel()

    async def _paced(self, client: aiohttp.ClientSession, model: str, rate: float) -> None:
        loop, most, due = (
            asyncio.get_running_loop(),
            max(1, round(MOST_SECONDS * rate)),
            asyncio.get_running_loop().time(),
        )
        mine = set[Request]()
        while not self._ended.is_set():
            tally = self.tally
            if len(mine) < most:
                tally.late = max(tally.late, loop.time() - due)
                self._send(client, tally, Request(model, next(self._numbers)), mine)
            else:
                tally.unsent += 1
            due += 1 / rate
            if (behind := int((loop.time() - 1 - due) * rate)) > 0:  # what a busy machine has missed is not made up for
                tally.unsent += behind
                due += behind / rate
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _send(self, client: aiohttp.ClientSession, tally: Tally, request: Request, mine: set[Request]) -> None:
        mine.add(request)
        task = tally.open[request] = asyncio.get_running_loop().create_task(self._ask(client, request, tally))

        def ended(task: asyncio.Task[None]) -> None:
            mine.discard(request)
            del tally.open[request]
            tally.ends += 1
            if not task.cancelled() and (error := task.exception()) is not None:
                tally.wrong.append(f"{request}: {error!r}")

        task.add_done_callback(ended)

    async def _ask_the_model(self, client: aiohttp.ClientSession) -> None:
        while True:
            try:
                async with client.get(self._model_url) as answer:
                    await answer.read()
                self._answers += 1
            except (aiohttp.ClientError, OSError):
                pass  # it is gone for some time
            await asyncio.sleep(LOOK_SECONDS)

    async def _until_complete(self, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        ends, since, answers = tally.ends, loop.time(), self._answers
        while tally.open:
            await asyncio.sleep(LOOK_SECONDS)
            if tally.ends != ends:
                ends, since, answers = tally.ends, loop.time(), self._answers
            elif loop.time() - since > HANGS_SECONDS and self._answers - answers > HANGS_ANSWERS:
                tally.hung += [str(request) for request in tally.open]
                for task in tally.open.values():
                    task.cancel()
                await asyncio.gather(*tally.open.values(), return_exceptions=True)

    async def _ask(self, client: aiohttp.ClientSession, request: Request, tally: Tally) -> None:
        pause = FIRST_PAUSE
        while (again := await self._tried(client, request, tally)) is not None:
            request.last, seconds = again
            tally.repeats[request.model, request.last] += 1
            await asyncio.sleep(seconds or pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _tried(self, client: aiohttp.ClientSession, request: Request, tally: Tally) -> tuple[str, float] | None:
        """Send a request once, and count its answer.

        Return why it is to be repeated, and after how long where the answer says so; None where it is not.
        """
        model, number = request.model, request.number
        body, begun, content = {"model": model, "number": number, "pause": PAUSE}, False, b""
        try:
            async with client.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    error = json.loads(await answer.read())["error"]
                    return f"{answer.status} {error['code']}", float(answer.headers.get("Retry-After", 0))
                begun = True
                async for piece in answer.content.iter_any():
                    content += piece
        except (aiohttp.ClientError, OSError) as error:
            if not begun:
                return type(error).__name__, 0.0
        wanted = b"".join(b"data: %d\n\n" % (number * 10 + step) for step in range(PIECES))
        if content == wanted:
            tally.whole[model] += 1
        elif wanted.startswith(content):
            tally.cut[model] += 1
        else:
            tally.wrong.append(f"{model} {number}: {content!r}")
        return None


@contextmanager
def loading(url: str, rates: Mapping[str, float], model_url: str) -> Iterator[Load]:
    """Run a load while the block runs; what it has begun has ended, or is said to hang, when the block ends."""
    load = Load(url, rates, model_url)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.end()
        thread.join()

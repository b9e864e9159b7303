"""Requests at an even rate through a proxy, by a client that repeats as OpenAI's package does, and what became of each.

A request is repeated where it had no answer, or one that says so; it is `cut` where its answer had begun and did not
become whole: no client can repeat that. Nothing else can happen to it, or it hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

HANGS_SECONDS = 60.0  # longer than any repair of these tests takes
PIECES = 3  # of an answer
PAUSE = 0.03  # between them


@dataclass
class Tally:
    """What became of the requests of some time: `repeats` by model and reason."""

    whole: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    repeats: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        repeats = ", ".join(f"{model} {reason}: {count}" for (model, reason), count in sorted(self.repeats.items()))
        return f"whole {dict(self.whole)}, cut {dict(self.cut)}, repeated {{{repeats}}}, hung {len(self.hung)}"


class Load:
    """Asks `url` for models, each so many times a second. `tally` is where requests count that begin from now on."""

    def __init__(self, url: str, rates: dict[str, float]) -> None:
        self._url, self._rates = url, rates
        self.tally = Tally()
        self._ended = threading.Event()
        self._numbers = itertools.count(1)

    def run(self) -> None:
        asyncio.run(self._run())

    def end(self) -> None:
        self._ended.set()

    async def _run(self) -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as client:
            await asyncio.gather(*(self._paced(client, model, rate) for model, rate in self._rates.items()))

    async def _paced(self, client: aiohttp.ClientSession, model: str, rate: float) -> None:
        loop, requests = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        due = loop.time()
        while not self._ended.is_set():
            task = loop.create_task(self._ask(client, model, next(self._numbers), self.tally))
            requests.add(task)
            task.add_done_callback(requests.discard)
            due = max(due + 1 / rate, loop.time() - 1)  # what a machine that is busy has missed is not made up for
            await asyncio.sleep(max(0.0, due - loop.time()))
        await asyncio.gather(*requests)

    async def _ask(self, client: aiohttp.ClientSession, model: str, number: int, tally: Tally) -> None:
        last = "nothing yet"
        try:
            async with asyncio.timeout(HANGS_SECONDS):
                while last := await self._tried(client, model, number, tally):
                    tally.repeats[model, last] += 1
                    await asyncio.sleep(0.05)
        except TimeoutError:
            tally.hung.append(f"{model} {number}, after {last}")

    async def _tried(self, client: aiohttp.ClientSession, model: str, number: int, tally: Tally) -> str:
        """Send a request once, and count its answer; return why it is to be repeated, "" where it is not."""
        body, begun, content = {"model": model, "number": number, "pause": PAUSE}, False, b""
        try:
            async with client.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    error = json.loads(await answer.read())["error"]
                    return f"{answer.status} {error['code']}"
                begun = True
                async for piece in answer.content.iter_any():
                    content += piece
        except (aiohttp.ClientError, OSError) as error:
            if not begun:
                return type(error).__name__
        wanted = b"".join(b"data: %d\n\n" % (number * 10 + step) for step in range(PIECES))
        if content == wanted:
            tally.whole[model] += 1
        elif wanted.startswith(content):
            tally.cut[model] += 1
        else:
            tally.wrong.append(f"{model} {number}: {content!r}")
        return ""


@contextmanager
def loading(url: str, rates: dict[str, float]) -> Iterator[Load]:
    """Run a load while the block runs; what it has begun has ended, or is said to hang, when the block ends."""
    load = Load(url, rates)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.end()
        thread.join()

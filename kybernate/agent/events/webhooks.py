"""Webhooks: each event is posted to each configured URL, at least once, in order.

Every hook has a task and a cursor of its own and reads the journal by itself. A receiver that is slow, dead or hostile
delays neither the agent nor another hook: an attempt has a deadline, nothing of an answer is read but its head, and
redirects are not followed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kybernate.agent.events import delivery
from kybernate.agent.events.cursors import Cursors
from kybernate.agent.events.delivery import Verdict
from kybernate.agent.events.store import EventStore
from kybernate.agent.journal import JournalUnusable
from kybernate.messages import agent_pb2 as api
from kybernate.node.failure import Failure
from kybernate_shim import __version__

if TYPE_CHECKING:
    import httpx

    from kybernate_shim.logs import Log

ATTEMPT_SECONDS = 15.0
REFUSALS = 5  # after so many refusals of one event it is given up
GIVE_UP_SECONDS = 24 * 3600.0
JOURNAL_SECONDS = 10.0  # until a journal that cannot be used is tried again
LEVELS = ("info", "warning", "error")


@dataclass(frozen=True)
class Hook:
    """A receiver. `types` are patterns such as "container.*", none means all; `level` is the least severe one.

    Raises Failure for a URL of another scheme.
    """

    url: str
    secret: bytes = field(default=b"", repr=False)
    types: tuple[str, ...] = ()
    level: str = "info"

    def __post_init__(self) -> None:
        advice = "give an https:// or http:// URL with a host"
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # it is read only when it is asked for
        except ValueError as error:
            raise Failure(f"the URL of a webhook cannot be read: {error}", advice=advice) from error
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise Failure(
                f"the URL of a webhook has the scheme {parts.scheme!r} and the host {parts.hostname!r}", advice=advice
            )

    @property
    def title(self) -> str:
        """Its name in logs, without what may be a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"

    def wants(self, event: api.Event) -> bool:
        """Return whether the event is one to be posted."""
        severe = event.level not in LEVELS or LEVELS.index(event.level) >= LEVELS.index(self.level)
        return severe and (not self.types or any(fnmatchcase(event.type, pattern) for pattern in self.types))


@dataclass(frozen=True)
class Timing:
    """What tests replace. `chance` returns 0 to 1."""

    attempt_seconds: float = ATTEMPT_SECONDS
    now: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random
    sleep: Callable[[float], object] = asyncio.sleep


class Webhooks:
    """All hooks. `wake` is a sink of the log of events."""

    def __init__(self, store: EventStore, cursors: Cursors, node: str, log: Log, timing: Timing | None = None) -> None:
        self._store = store
        self._cursors = cursors
        self._node = node
        self._log = log
        self._timing = timing or Timing()
        self._running: dict[Hook, _Delivery] = {}

    async def configure(self, hooks: Iterable[Hook]) -> None:
        """Post to these hooks from now on. One that is new gets what happens from now on; one that stays continues.

        Raises JournalUnusable.
        """
        wanted = {hook.url: hook for hook in hooks}
        await self._end(set(self._running) - set(wanted.values()))
        await self._cursors.keep(wanted.keys())
        last = await self._store.last()
        for hook in wanted.values():
            if hook not in self._running:
                cursor = await self._cursors.begin(hook.url, last)
                self._running[hook] = _Delivery(hook, cursor, self._store, self._cursors, self._node, self._log)
                self._running[hook].start(self._timing)

    def wake(self, event: api.Event) -> None:
        """Let the hooks look for events."""
        for running in self._running.values():
            running.news.set()

    async def close(self) -> None:
        """End all deliveries; what is not delivered is sent after the next start."""
        await self._end(set(self._running))

    async def _end(self, hooks: Iterable[Hook]) -> None:
        for running in [self._running.pop(hook) for hook in hooks]:
            await running.stop()


class _Delivery:
    """One hook at work."""

    def __init__(self, hook: Hook, cursor: int, store: EventStore, cursors: Cursors, node: str, log: Log) -> None:
        self.news = asyncio.Event()
        self._hook, self._cursor = hook, cursor
        self._store, self._cursors, self._node = store, cursors, node
        self._log = log.bind(hook=hook.title)
        self._task: asyncio.Task[None] | None = None

    def start(self, timing: Timing) -> None:
        self._timing = timing
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        import httpx  # most nodes have no hook, and need not pay for it

        # Neither a proxy nor credentials from the environment or a .netrc: the configuration alone says what is sent.
        async with httpx.AsyncClient(follow_redirects=False, timeout=None, trust_env=False) as client:
            while True:
                self.news.clear()
                try:
                    if not await self._deliver_page(client):
                        await self.news.wait()
                except JournalUnusable as error:
                    self._log.error("hook.interrupted", error=str(error))
                    await asyncio.sleep(JOURNAL_SECONDS)

    async def _deliver_page(self, client: httpx.AsyncClient) -> bool:
        """Deliver the next events; return False where there are none."""
        page = await self._store.between(self._cursor, await self._store.last())
        for event in page:
            if self._hook.wants(event):
                await self._deliver(client, event)
                await self._cursors.advance(self._hook.url, event.id)
            self._cursor = event.id  # on the disk with the next delivery: until then there is nothing to repeat
        return bool(page)

    async def _deliver(self, client: httpx.AsyncClient, event: api.Event) -> None:
        """Post one event until it is accepted, refused for good, or a day old."""
        refusals, attempt = 0, 0
        while True:
            verdict, why, wish = await self._attempt(client, event)
            attempt += 1
            refusals += verdict is Verdict.REFUSED
            if verdict is Verdict.DONE:
                return
            pause = delivery.pause_before(attempt, wish, self._timing.chance)
            too_old = self._timing.now() + pause - event.time.ToNanoseconds() / 1e9 > GIVE_UP_SECONDS
            if too_old or refusals >= REFUSALS:
                self._log.error("delivery.abandoned", id=event.id, type=event.type, attempts=attempt, error=why)
                return
            self._log.warning(
                "delivery.delayed", id=event.id, attempts=attempt, error=why, pause_seconds=round(pause, 1)
            )
            await self._timing.sleep(pause)  # type: ignore[misc]

    async def _attempt(self, client: httpx.AsyncClient, event: api.Event) -> tuple[Verdict, str, float]:
        """Post an event once; return what came of it, why, and how long the receiver wants no more."""
        import httpx

        body, now = delivery.body_of(event, self._node), self._timing.now()
        try:
            async with (
                asyncio.timeout(self._timing.attempt_seconds),
                client.stream("POST", self._hook.url, content=body, headers=self._headers(event, body, now)) as answer,
            ):
                moment = datetime.fromtimestamp(now, UTC)
                wish = delivery.wish_of(answer.headers.get("retry-after", ""), moment)
                return delivery.verdict_of(answer.status_code), f"status {answer.status_code}", wish
        except TimeoutError:
            return Verdict.AGAIN, f"no answer in {self._timing.attempt_seconds:g} s", 0.0
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Verdict.AGAIN, str(error) or type(error).__name__, 0.0

    def _headers(self, event: api.Event, body: bytes, now: float) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"kybernate/{__version__}",
            delivery.TYPE: event.type,
            delivery.DELIVERY: delivery.delivery_id(event, self._hook.url, self._node),
        }
        if self._hook.secret:
            headers[delivery.SIGNATURE] = delivery.signature_of(body, self._hook.secret, int(now))
        return headers

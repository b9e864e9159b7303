"""Writes events of the agent to the API server, as Events of the pods that they are about.

`offer` and `say` only queue: neither a slow nor an absent API server holds up the agent. Which event is written when,
and which are counted together, is decided in series.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kybernate.agent.journal import JournalUnusable
from kybernate.agent.kubernetes.api import ApiRefused, ApiUnreachable, Object
from kybernate.agent.kubernetes.series import Correlator, Series
from kybernate.agent.kubernetes.story import Subject, Told, shortened, told
from kybernate.messages import agent_pb2 as wire

if TYPE_CHECKING:
    from kybernate.agent.kubernetes.api import Api
    from kybernate_shim.logs import Log

COMPONENT: Final = "kybernate"
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # between attempts at an API server that is away
FORBIDDEN, NOT_FOUND, CONFLICT = 403, 404, 409
TERMINATED: Final = "is being terminated"
DOUBLE_SECONDS: Final = 30.0  # within which shim and agent report the same failure


class Speaker:
    """Queues and writes the events of pods.

    `subject_of` returns the pod that an event of a container (containerd's namespace, id) is about, None where there
    is none. `field_of` returns where the container is in its pod's spec. `settled` gets, after each write, the id up to
    which no event waits.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        subject_of: Callable[[str, str], Subject | None],
        field_of: Callable[[Subject], str],
        log: Log,
        *,
        settled: Callable[[int], Awaitable[object]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._node, self._log = api, node, log
        self._subject_of, self._field_of = subject_of, field_of
        self._settled, self._now = settled, now
        self._correlator = Correlator()
        self._news = asyncio.Event()
        self._failures: dict[tuple[Subject, str], tuple[bool, float]] = {}
        self._dropped = 0
        self._refused: set[int] = set()  # statuses that the log has

    def offer(self, event: wire.Event) -> None:
        """Take an event of the agent's log of events; never blocks."""
        self._correlator.pass_over(event.id)
        if not event.container or (what := told(event)) is None:
            return
        subject = self._subject_of(event.namespace, event.container)
        if subject is not None and not self._is_double(subject, what, event):
            self.say(subject, what, event)

    def say(self, subject: Subject, what: Told, event: wire.Event | None = None) -> None:
        """Take an event, of the log where it has one; never blocks."""
        what = Told(what.reason, shortened(what.message), what.warning)
        id, wall = (event.id, event.time.ToNanoseconds() / 1e9) if event is not None and event.id else (0, time.time())
        self._correlator.add(subject, what, self._now(), wall, id)
        self._news.set()

    async def run(self) -> None:
        """Write what is taken, until cancelled."""
        pause = 0.0
        while True:
            self._news.clear()
            series, wait = self._correlator.next(self._now())
            if series is None:
                self._count_dropped()
                await self._wait(wait)
                continue
            try:
                await self._write(series)
            except ApiUnreachable as error:
                if not pause:
                    self._log.warning("kubernetes.lost", error=str(error), state="events on pods wait")
                pause = min(max(FIRST_PAUSE, pause * 2), LONGEST_PAUSE)
                await asyncio.sleep(pause)
            else:
                if pause:
                    self._log.info("kubernetes.regained", server=self._api.access.server)
                pause = 0.0

    def _is_double(self, subject: Subject, what: Told, event: wire.Event) -> bool:
        """Return whether the other one of shim and agent has just reported the failure."""
        by_agent = event.type.startswith("operation.")
        if not (by_agent or event.type.endswith(".failed")):
            return False
        now, key = self._now(), (subject, what.reason)
        self._failures = {name: seen for name, seen in self._failures.items() if now - seen[1] < DOUBLE_SECONDS}
        known = self._failures.pop(key, None)
        if known is not None and known[0] != by_agent:
            return True
        self._failures[key] = by_agent, now
        return False

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _write(self, series: Series) -> None:
        """Create the series' object, or bring its count up to date. Raises ApiUnreachable."""
        count, newest = series.count, series.newest
        try:
            await self._put(series)
        except ApiRefused as error:
            if error.status == NOT_FOUND and series.name:  # it has expired
                self._correlator.gone(series)
            elif error.temporary:
                raise ApiUnreachable(str(error)) from error
            else:
                self._refuse(series, error)
            return
        self._correlator.written(series, count, self._now(), newest)
        try:
            await self._settled(self._correlator.settled())
        except JournalUnusable as error:
            self._log.warning("kubernetes.not_noted", error=str(error), state="a restart writes the event once more")

    async def _put(self, series: Series) -> None:
        path = f"/api/v1/namespaces/{series.subject.namespace}/events"
        if not series.name:
            name = series.new_name
            try:
                await self._api.create(path, body_of(series, name, self._node, self._field_of(series.subject)))
            except ApiRefused as error:
                if error.status != CONFLICT:
                    raise
                await self._api.patch(f"{path}/{name}", counted(series))  # an answer was lost
            series.name = name
        else:
            await self._api.patch(f"{path}/{series.name}", counted(series))

    def _refuse(self, series: Series, error: ApiRefused) -> None:
        """Give up what the API server does not take; the log says each kind of refusal once.

        A missing right may be granted yet, and an API server that has just begun knows of none.
        """
        gone = error.status == NOT_FOUND or TERMINATED in str(error)  # the namespace, with all that is in it
        waits = error.status == FORBIDDEN and not gone
        if waits:
            self._correlator.postpone(series, self._now())
        else:
            self._correlator.drop(series)
        if error.status not in self._refused and not gone:
            self._refused.add(error.status)
            state = "the pod's events wait for an hour" if waits else "the event is dropped"
            advice = "apply packaging/kubernetes/rbac.yaml" if waits else ""
            self._log.warning("kubernetes.refused", error=str(error), state=state, advice=advice)

    def _count_dropped(self) -> None:
        if more := self._correlator.dropped - self._dropped:
            self._dropped = self._correlator.dropped
            self._log.warning("kubernetes.events_dropped", count=more, total=self._dropped)


def body_of(series: Series, name: str, node: str, field: str) -> Object:
    """Return the object of a new Event."""
    subject = series.subject
    involved: dict[str, Any] = {
        "apiVersion": "v1", "kind": "Pod", "namespace": subject.namespace, "name": subject.pod, "uid": subject.uid,
    }  # fmt: skip
    if subject.container:
        involved["fieldPath"] = field
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": subject.namespace},
        "involvedObject": involved,
        "reason": series.told.reason,
        "type": "Warning" if series.told.warning else "Normal",
        "firstTimestamp": time_of(series.first),
        **counted(series),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    }


def counted(series: Series) -> Object:
    """Return the fields of an Event that change when it happens again."""
    return {"count": series.count, "lastTimestamp": time_of(series.last), "message": series.told.message}


def time_of(seconds: float) -> str:
    """Return a time as the API has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

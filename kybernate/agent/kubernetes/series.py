"""Which events are written next: repeated ones are counted, similar ones combined, and pods and node have limits. Pure.

What happens again is one event with a count, written less often the more often it happens. A pod that differs
each time (durations, sizes) gets one combined event after ten of a kind. What is still too much waits; what does not
fit any more, or has waited for an hour, is dropped and counted. So a container that fails in a loop costs the API
server a few writes per minute at first, and later one in ten minutes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kybernate.agent.kubernetes.story import Subject, Told

SIMILAR: Final = 10  # messages of one reason, of one container
COMBINED: Final = "(combined from similar events) "
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0  # seconds between two writes of one series
POD_BURST, POD_SECONDS = 25, 60.0  # new events of one pod: so many, and one more each minute
NODE_BURST, NODE_SECONDS = 50, 0.5  # writes of the node
MOST_SERIES: Final = 2000  # that are remembered; kept as long as the API server keeps an event
KEEP_SECONDS: Final = 3600.0

Key = tuple[Subject, str, str]


@dataclass
class Series:
    """The same event, `count` times between `first` and `last`, in seconds since 1970; `written` are those written.

    `oldest` and `newest` are ids in the log of events: of the first that is not written, and of the last; 0 for none.
    `heard` and `due` are times of the monotonic clock: of its last event, and before which it is not written.
    """

    subject: Subject
    told: Told
    first: float
    last: float
    heard: float
    count: int = 1
    written: int = 0
    oldest: int = 0
    newest: int = 0
    name: str = ""  # of the object, once there is one
    pause: float = 0.0
    due: float = 0.0

    @property
    def new_name(self) -> str:
        """Return the name of the event's object: the pod's, and a number, as kubelet makes it."""
        text = repr((self.subject, self.told, self.first))
        return f"{self.subject.pod[:200].rstrip('.-')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass
class Bucket:
    """So many tokens at most; a new one each `seconds`."""

    burst: int
    seconds: float
    tokens: float = 0.0
    at: float = 0.0

    def due(self, now: float) -> float:
        """Return when there is a token."""
        self._fill(now)
        return now if self.tokens >= 1 else now + (1 - self.tokens) * self.seconds

    def take(self, now: float) -> None:
        self._fill(now)
        self.tokens -= 1

    def _fill(self, now: float) -> None:
        if not self.at:
            self.tokens = float(self.burst)
        self.tokens = min(float(self.burst), self.tokens + max(0.0, now - self.at) / self.seconds)
        self.at = now


@dataclass
class Correlator:
    """Takes events, and says which to write. `dropped` counts those that were given up."""

    dropped: int = 0
    _last: int = 0
    _series: OrderedDict[Key, Series] = field(default_factory=OrderedDict)
    _kinds: OrderedDict[tuple[Subject, str], tuple[float, set[str]]] = field(default_factory=OrderedDict)
    _pods: OrderedDict[str, Bucket] = field(default_factory=OrderedDict)
    _node: Bucket = field(default_factory=lambda: Bucket(NODE_BURST, NODE_SECONDS))

    def add(self, subject: Subject, told: Told, now: float, wall: float, id: int = 0) -> None:
        """Take an event, `id` of the log. `now` is monotonic, as everywhere here; `wall` is in seconds since 1970."""
        key = self._key(subject, told, now)
        known = self._series.pop(key, None)
        if known is None or (known.written == known.count and now - known.heard > KEEP_SECONDS):
            known = Series(subject, told, wall, wall, now)
        else:
            known.count, known.last, known.heard, known.told = known.count + 1, wall, now, told
        if key[2].startswith(COMBINED):
            known.told = Told(told.reason, COMBINED + told.message, told.warning)
        known.oldest, known.newest = known.oldest or id, max(known.newest, id)
        self.pass_over(id)
        self._series[key] = known
        if len(self._series) > MOST_SERIES:
            _, oldest = self._series.popitem(last=False)
            self.dropped += oldest.count - oldest.written

    def pass_over(self, id: int) -> None:
        """Note an event of which nothing is written."""
        self._last = max(self._last, id)

    def settled(self) -> int:
        """Return the id of the last event before which none waits to be written."""
        waiting = [one.oldest for one in self._series.values() if one.count > one.written and one.oldest]
        return min(waiting) - 1 if waiting else self._last

    def next(self, now: float) -> tuple[Series | None, float | None]:
        """Return what to write now, else in how many seconds there may be something; None: after the next event."""
        waiting = [(key, one) for key, one in self._series.items() if one.count > one.written]
        for key, one in waiting:
            if now - one.heard > KEEP_SECONDS:
                self.dropped += one.count - one.written
                del self._series[key]
        waiting = [(key, one) for key, one in waiting if key in self._series]
        if not waiting:
            return None, None
        times = [(self._due(one, now), number) for number, (_, one) in enumerate(waiting)]
        when, number = min(times)
        return (waiting[number][1], None) if when <= now else (None, when - now)

    def written(self, series: Series, count: int, now: float, newest: int = 0) -> None:
        """Note that `count` of the series are in the API, under its name; the last one was `newest`."""
        self._node.take(now)
        if not series.written:
            self._pod(series.subject.uid).take(now)
        series.written, series.oldest = count, newest + 1 if series.newest > newest else 0
        series.pause = min(max(FIRST_PAUSE, series.pause * 2), LONGEST_PAUSE)
        series.due = now + series.pause

    def postpone(self, series: Series, now: float) -> None:
        """Let a series that was refused wait, and others pass."""
        series.pause = min(max(FIRST_PAUSE, series.pause * 2), LONGEST_PAUSE)
        series.due = now + series.pause

    def gone(self, series: Series) -> None:
        """Note that the API has removed the series' object: what follows is a new one."""
        series.name = ""

    def drop(self, series: Series) -> None:
        """Give up what is not written of a series."""
        self.dropped += series.count - series.written
        series.written = series.count

    def _key(self, subject: Subject, told: Told, now: float) -> Key:
        """Return which series an event belongs to."""
        kind = subject, told.reason
        since, messages = self._kinds.pop(kind, (now, set()))
        if now - since > LONGEST_PAUSE:
            since, messages = now, set()
        if len(messages) < SIMILAR:
            messages.add(told.message)
        self._kinds[kind] = since, messages
        if len(self._kinds) > MOST_SERIES:
            self._kinds.popitem(last=False)
        return subject, told.reason, told.message if told.message in messages else COMBINED

    def _due(self, series: Series, now: float) -> float:
        pod = now if series.written else self._pod(series.subject.uid).due(now)
        return max(series.due, pod, self._node.due(now))

    def _pod(self, uid: str) -> Bucket:
        found = self._pods.pop(uid, None) or Bucket(POD_BURST, POD_SECONDS)
        self._pods[uid] = found
        if len(self._pods) > MOST_SERIES:
            self._pods.popitem(last=False)
        return found

"""All that the page knows: a fold of changes, with a version for each section by which browsers ask for it again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar, cast

from kybernate.page.view import (
    AWAY,
    SECTIONS,
    Begin,
    Change,
    Container,
    End,
    Event,
    Found,
    Gone,
    Gpu,
    Image,
    Lost,
    Object,
    Operation,
    Put,
    Seat,
    Section,
    Tier,
)

EVENTS: Final = 100_000  # that are kept; older ones are with the agent
ENDED_OPERATIONS: Final = 2_000  # that are kept
WAKES: Final = 40  # durations for a container's chart
WAKING: Final = frozenset({"resume", "restore", "wake"})
PAGE: Final = 100  # rows

Row = TypeVar("Row")
Objects = dict[type, dict[str, Object]]  # by kind and key


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """A page of a list: its rows, its number from 1, how many pages and rows there are."""

    rows: Sequence[Row]
    number: int
    pages: int
    total: int


class Known:
    """What the source has reported. `apply` is the only way to change it; all on one thread.

    Versions begin with `first`, which no earlier process has reached: a browser outlives the one that it asked.
    """

    def __init__(self, first: int = 0) -> None:
        self.name = ""
        self.versions: tuple[tuple[str, str], ...] = ()
        self.trouble: Lost | None = Lost("the page has not reached the agent yet")
        self.version = dict.fromkeys(Section, first)
        self._objects: Objects = {kind: {} for kind in SECTIONS}
        self._arriving: Objects | None = None
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._ended: deque[str] = deque()  # keys of operations that are final, oldest first
        self._wakes: dict[str, deque[float]] = {}

    # -- changes

    def apply(self, change: Change) -> frozenset[Section]:
        """Take over one change, and return the sections that look different now."""
        changed = frozenset(self._apply(change))
        for section in changed:
            self.version[section] += 1
        return changed

    def _apply(self, change: Change) -> Iterable[Section]:
        match change:
            case Begin():
                self._arriving = {kind: {} for kind in SECTIONS}
            case End():
                return self._arrived()
            case Put(object=Event() as event):
                return self._happened(event)
            case Put(object=object):
                return self._put(object)
            case Gone(object=object):
                objects = self._objects if self._arriving is None else self._arriving
                if objects[type(object)].pop(str(object.key), None) is not None and self._arriving is None:
                    return {SECTIONS[type(object)]}
            case Lost():
                self.trouble = change
                return {Section.STATUS}
            case Found():
                self.trouble, self.name, self.versions = None, change.name, change.versions
                return {Section.STATUS}
        return ()

    def _arrived(self) -> Iterable[Section]:
        """Replace all objects by those of the snapshot. Ended operations and events that are known stay."""
        if self._arriving is None:
            return ()
        arrived, self._arriving = self._arriving, None
        before = self._objects
        kept = {key: one for key, one in before[Operation].items() if isinstance(one, Operation) and not one.live}
        arrived[Operation] = kept | arrived[Operation]
        self._objects = arrived
        ended = [self._note_end(one, before[Operation].get(key)) for key, one in list(arrived[Operation].items())]
        changed = {section for kind, section in SECTIONS.items() if before[kind] != self._objects[kind]}
        return changed | ({Section.CONTAINERS} if any(ended) else set())

    def _happened(self, event: Event) -> Iterable[Section]:
        if self._events and event.key <= self._events[-1].key:
            return ()  # a source that was away repeats what it does not know was taken
        self._events.append(event)
        return {Section.EVENTS}

    def _put(self, object: Object) -> Iterable[Section]:
        kind, key = type(object), str(object.key)
        if self._arriving is not None:
            self._arriving[kind][key] = object
            return ()
        before = self._objects[kind].get(key)
        if before == object:
            return ()
        self._objects[kind][key] = object
        changed = {SECTIONS[type(object)]}
        if self._note_end(object, before):
            changed.add(Section.CONTAINERS)  # their charts
        return changed

    def _note_end(self, object: Object, before: Object | None) -> bool:
        """Note an operation that has ended; return whether a chart has a new bar."""
        if not isinstance(object, Operation) or object.live:
            return False
        if isinstance(before, Operation) and not before.live:
            return False
        self._ended.append(object.key)
        while len(self._ended) > ENDED_OPERATIONS:
            self._objects[Operation].pop(self._ended.popleft(), None)
        if object.verb not in WAKING or object.state != "succeeded" or not object.container:
            return False
        if object.verb == "wake" and not object.steps:
            return False  # it worked already
        self._wakes.setdefault(object.container, deque(maxlen=WAKES)).append(object.seconds)
        return True

    # -- what is shown

    def _of(self, kind: type[Row]) -> list[Row]:
        return cast(list[Row], list(self._objects[kind].values()))

    def gpus(self) -> list[Gpu]:
        return sorted(self._of(Gpu), key=lambda one: one.index)

    def seats(self) -> list[Seat]:
        """Return the seats by their groups; those of a group by priority, the highest first."""
        return sorted(self._of(Seat), key=lambda one: (one.group, -one.priority, one.key))

    def seats_of(self) -> dict[str, Seat]:
        """Return the seats that containers have, by their keys."""
        return {one.container: one for one in self._of(Seat) if one.container}

    def tiers(self) -> list[Tier]:
        return sorted(self._of(Tier), key=lambda one: one.key)

    def container(self, key: str) -> Container | None:
        """Return a container by its key."""
        found = self._objects[Container].get(key)
        return found if isinstance(found, Container) else None

    def title_of(self, key: str) -> str:
        """Return the title of a container; its key where it is not known."""
        found = self.container(key)
        return found.title if found is not None else key

    def image(self, key: str) -> Image | None:
        """Return an image by its key."""
        found = self._objects[Image].get(key)
        return found if isinstance(found, Image) else None

    def users(self, gpu: str) -> list[Container]:
        """Return the containers whose memory is on a GPU, by title."""
        found = (one for one in self._of(Container) if gpu in one.gpus and one.gpu and one.gpu not in AWAY)
        return sorted(found, key=lambda one: (one.title, one.key))

    def containers(self, wanted: str = "") -> list[Container]:
        """Return the containers that have `wanted` in title, image or phase, by title."""
        found = (one for one in self._of(Container) if _has(wanted, one.title, one.image, one.phase))
        return sorted(found, key=lambda one: (one.title, one.key))

    def images(self, wanted: str = "") -> list[Image]:
        """Return the images that have `wanted` in name, source or tier, newest first."""
        found = (one for one in self._of(Image) if _has(wanted, one.name, one.source, *one.tiers))
        return sorted(found, key=lambda one: (-one.created, one.key))

    def images_in(self, tier: str) -> list[Image]:
        """Return the images of which a tier has a complete copy, the largest first."""
        found = (one for one in self._of(Image) if tier in one.tiers)
        return sorted(found, key=lambda one: (-one.bytes, one.name, one.key))

    def operations(self, container: str = "") -> list[Operation]:
        """Return the operations, of a container where one is named: those that run first, then the newest."""
        found = (one for one in self._of(Operation) if container in ("", one.container))
        return sorted(found, key=lambda one: (not one.live, -one.created, one.key))

    def events(self, level: str = "", container: str = "") -> Iterator[Event]:
        """Yield the events, newest first, of a level or a container where one is named."""
        id = container.rpartition("/")[2]
        for event in reversed(self._events):
            if level in ("", event.level) and id in ("", event.container):
                yield event

    def event_rows(self, number: int, level: str = "") -> Rows[Event]:
        """Return a page of the events without a copy of all of them."""
        total = len(self._events) if not level else sum(1 for _ in self.events(level))
        number, pages = _within(number, total)
        start = (number - 1) * PAGE
        return Rows(list(islice(self.events(level), start, start + PAGE)), number, pages, total)

    def wakes(self, container: str) -> Sequence[float]:
        """Return the seconds of a container's last successful wakes, oldest first."""
        return tuple(self._wakes.get(container, ()))


def rows(all: Sequence[Row], number: int) -> Rows[Row]:
    """Return a page of a list; the nearest one where there is no such page."""
    number, pages = _within(number, len(all))
    return Rows(all[(number - 1) * PAGE : number * PAGE], number, pages, len(all))


def _within(number: int, total: int) -> tuple[int, int]:
    pages = max(1, -(-total // PAGE))
    return min(max(1, number), pages), pages


def _has(wanted: str, *texts: str) -> bool:
    return not wanted or any(wanted.casefold() in text.casefold() for text in texts)


Why = Callable[[Container, Known], str]


def why(container: Container, known: Known) -> str:
    """Return in sentences why a container is as it is: what runs on it, what failed last, what has the room."""
    operations = known.operations(container.key)
    running = next((one for one in operations if one.live), None)
    if running is not None:
        left = f", about {running.seconds_left:.0f} s are left" if running.seconds_left else ""
        return f"{running.verb} is {running.state}: {running.step or 'it waits for its turn'}{left}."
    if container.problem:
        return f"Its shim does not answer: {container.problem}."
    seat = known.seats_of().get(container.key)
    waits = f" It waits for {container.waits_for}." if container.waits_for else ""
    if container.phase not in AWAY:
        return f"It is {container.phase}.{waits}" + _of_seat(seat) + (f" {container.note}" if container.note else "")
    if seat is not None and (seat.reason or seat.waits):
        said = [f"It is {container.phase}.{waits}{_of_seat(seat)}"]
    elif container.waits_for:
        said = [f"It is {container.phase}.{waits}"]
    elif container.note:
        said = [f"It is {container.phase}: {container.note}"]
    else:
        said = [f"It is {container.phase}, and nothing has asked for it."]
    last = next((one for one in operations if one.verb in WAKING), None)
    if last is not None and last.state == "failed":
        said.append(f"Its last {last.verb} failed: {last.error}." + (f" {last.advice}." if last.advice else ""))
    gpus = {one.key: one for one in known.gpus()}
    for key in container.gpus:
        if (gpu := gpus.get(key)) is not None and gpu.total - gpu.used < container.host_bytes:
            users = ", ".join(one.title for one in known.users(key)) or "programs outside Kybernate"
            said.append(f"GPU {gpu.index} has less free memory than it needs; {users} hold the rest.")
    return " ".join(said)


def _of_seat(seat: Seat | None) -> str:
    """Return what the arbiter says of a seat, in sentences that follow others."""
    if seat is None:
        return ""
    said = f" Its seat {seat.key} in the group {seat.group} is {seat.status}"
    said += f": {seat.reason.rstrip('.')}." if seat.reason else "."
    if seat.waits:
        said += f" Open requests: {', '.join(seat.waits)}."
    if seat.before:
        said += f" Before it: {', '.join(seat.before)}."
    if seat.error:
        said += f" Its last change failed: {seat.error.rstrip('.')}."
    return said

"""What the node reports of a seat's container, and the seat that follows from it. Pure.

The shim's word on the container and NVML's on its memory are the truth. What the arbiter remembers of a seat counts for
as long as an action on it runs, and then gives way to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kybernate.agent.seats.claims import Claim, Key
from kybernate.agent.seats.former import Former
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import LIVE
from kybernate.seats.groups import Place
from kybernate.seats.model import NEVER, Request, Seat, Status
from kybernate.seats.outcomes import done
from kybernate_shim.sizes import mib

COMING = frozenset({wire.Container.RESUMING, wire.Container.RESTORING})
KEPT = frozenset({Status.SUSPENDED, Status.PARKED, Status.FAILED})  # what the shim knows as suspended
CONTEXT_BYTES = 2 << 30  # what contexts of a container's processes may take of a GPU beyond what it has declared
AT_THE_GATE = frozenset({"start", "operation"})  # causes of requests that last as long as what waits does


@dataclass(frozen=True)
class Seen:
    """A container with a seat as it is now.

    `held_bytes` is what NVML reports of it, the most on one GPU; None where the driver does not answer. `busy`: it has
    worked since the last look. `priority` is its pod's, or its own. `waits` is the cause of what waits for its room:
    "start" or "operation", "" where nothing does. `takes`: what was let in takes its room at present.
    """

    container: wire.Container
    claim: Claim
    held_bytes: int | None = None
    busy: bool = False
    priority: int = 0
    waits: str = ""
    stands_by_for: str = ""  # a seat
    takes: bool = False
    waits_since: float = NEVER  # when the operation was asked for that waits
    former: Former | None = None  # its last turn under a former run of the agent, where it is seen first

    @property
    def live(self) -> bool:
        return self.container.state in LIVE


def free(place: Place, old: Seat | None, *, awaited: bool) -> Seat:
    """Return a seat without a container. It is lost where it has had one and another seat stands by for it."""
    lost = awaited and old is not None and (old.lost or bool(old.container))
    return Seat(place.name, place.group.name, place.group.mask, lost=lost)


def seated(place: Place, seen: Seen, old: Seat | None, now: float, *, acting: bool) -> Seat:
    """Return the seat of a container; `old` is what was known of it with the same container.

    `acting`: an action of the arbiter runs, whose outcome decides what it is next.
    """
    container, claim = seen.container, seen.claim
    known = old or Seat(place.name, place.group.name, place.group.mask, since=now, idle_since=now, asked_at=now)
    held = known.held_bytes if seen.held_bytes is None else seen.held_bytes
    learned = container.vram_bytes // len(place.group.gpus) if container.gpu == wire.Container.SUSPENDED else 0
    found = replace(
        known,
        container=container.workload or container.name or container.id,
        kind=claim.kind,
        priority=seen.priority,
        need_bytes=claim.vram or learned or known.need_bytes,
        held_bytes=held,
        may_share=known.may_share and not exceeds(claim, held),
        busy=seen.busy,
        idle_since=now if seen.busy else known.idle_since,
        parkable=container.arena_bytes > 0,
        parked_bytes=container.parked_bytes,
        overlaps=_overlaps(seen, held),
        stands_by_for=seen.stands_by_for,
        lost=container.gpu == wire.Container.STUCK,
    )
    status = status_of(seen, None if old is None else old.status, held, acting=acting)
    moved = _asking(_moved(found, status, now, first=old is None), seen, now)
    return _continued(moved, seen, now) if old is None else moved


def _overlaps(seen: Seen, held: int) -> bool:
    """Return whether a seat can be one side of a swap: it has VRAM to move, and what waits does not do that itself."""
    return not seen.waits and (held > 0 or seen.container.gpu == wire.Container.SUSPENDED)


def exceeds(claim: Claim, held: int) -> bool:
    """Return whether a container has taken more of a GPU than it has declared, as one without the library may."""
    return bool(claim.vram) and held > claim.vram + CONTEXT_BYTES


def overrun(claim: Claim, seat: Seat) -> str:
    """Return the sentence about a seat that is larger than declared."""
    return (
        f"seat {seat.name}: it holds {mib(seat.held_bytes)} of a GPU and has declared {mib(claim.vram)};"
        " it shares its GPUs with no other seat until it starts again"
    )


def status_of(seen: Seen, before: Status | None, held: int, *, acting: bool) -> Status:
    """Return what a seat is by what its container is; `before` is None where the container is seen first."""
    container = seen.container
    if before == Status.STARTING:
        is_up = container.state == wire.Container.RUNNING and container.gpu not in COMING
        return Status.ACTIVE if is_up else Status.STARTING
    if acting and before is not None:
        return before
    if container.state == wire.Container.CREATED:
        return Status.FREE
    if container.gpu == wire.Container.SUSPENDED and seen.takes:
        return Status.WAKING  # its room is claimed, however old the report is by which it was let in
    if container.gpu == wire.Container.SUSPENDED:
        there = Status.PARKED if container.parked_bytes else Status.SUSPENDED
        return Status.FAILED if before == Status.FAILED else there
    if container.gpu == wire.Container.PARKING:
        return Status.PARKING
    if container.gpu == wire.Container.SUSPENDING:
        return Status.SUSPENDING
    if container.gpu in COMING:
        return Status.WAKING
    if container.gpu == wire.Container.CHECKPOINTING and before is not None:
        return before
    if not held and (before is None or before in KEPT):
        return before or Status.SUSPENDED  # it has no memory on a GPU, and no right to any now
    return Status.ACTIVE


def _moved(seat: Seat, status: Status, now: float, *, first: bool) -> Seat:
    if status == seat.status:
        return seat
    if status == Status.ACTIVE and seat.status in (Status.STARTING, Status.WAKING):
        return done(seat, now)
    requests = () if status == Status.ACTIVE else seat.requests
    moved = replace(seat, status=status, since=now, requests=requests, partner="")
    return moved if first or status != Status.ACTIVE else replace(moved, idle_since=now, asked_at=now)


def _asking(seat: Seat, seen: Seen, now: float) -> Seat:
    """Return a seat with a request for what waits for its room, and without one where nothing waits any more."""
    if seat.status == Status.ACTIVE:
        return seat
    kept = tuple(one for one in seat.requests if one.cause not in AT_THE_GATE or one.cause == seen.waits)
    if seen.waits and not any(one.cause == seen.waits for one in kept) and not seat.occupies:
        kept = (*kept, Request(min(now, seen.waits_since), seen.waits))
    return seat if kept == seat.requests else replace(seat, requests=kept)


def _continued(seat: Seat, seen: Seen, now: float) -> Seat:
    """Return a seat that is seen first with its place in the order of a former run, if this is the same container."""
    former, started = seen.former, seen.container.started.ToMicroseconds() / 1e6
    if former is None or former.since < started:
        return seat
    if former.active and seat.status == Status.ACTIVE:
        return replace(seat, since=min(now, former.since), asked_at=min(now, former.asked))
    if former.active or former.asked == NEVER or seat.status not in (Status.SUSPENDING, Status.SUSPENDED):
        return seat
    return replace(seat, requests=(Request(min(now, former.asked), "preempted"), *seat.requests))


def standbys(
    keys: Mapping[str, Key],
    claims: Mapping[Key, Claim],
    containers: Mapping[Key, wire.Container],
    places: Iterable[str],
    former: Mapping[str, str],
) -> dict[str, str]:
    """Return for which seat each standby stands by.

    What it names is a seat, or a container by its id, title or name. What that meant before (`former`) counts while the
    container is gone.
    """
    names = {name: name for name in places}
    for name, key in keys.items():
        for alias in filter(None, (key[1], containers[key].title, containers[key].name)):
            names.setdefault(alias, name)
    wanted = {name: claims[key].stands_by_for for name, key in keys.items() if claims[key].stands_by_for}
    found = {name: names.get(other, former.get(name, "")) for name, other in wanted.items()}
    return {name: other for name, other in found.items() if other and other != name}

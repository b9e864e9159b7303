"""Seats as messages of the agent. Pure."""

from __future__ import annotations

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.agent.seats.claims import Key
from kybernate.messages import agent_pb2 as wire
from kybernate.seats.groups import Place
from kybernate.seats.model import NEVER, Seat, Status, Turn

MOST_TEXT: Final = 1024  # characters of an error
STATUSES: Final[dict[Status, wire.Seat.Status]] = {
    Status.FREE: wire.Seat.FREE,
    Status.STARTING: wire.Seat.STARTING,
    Status.ACTIVE: wire.Seat.ACTIVE,
    Status.SUSPENDING: wire.Seat.SUSPENDING,
    Status.SUSPENDED: wire.Seat.SUSPENDED,
    Status.PARKING: wire.Seat.PARKING,
    Status.PARKED: wire.Seat.PARKED,
    Status.WAKING: wire.Seat.WAKING,
    Status.FAILED: wire.Seat.FAILED,
}
IN_TURN: Final = (wire.Seat.STARTING, wire.Seat.WAKING, wire.Seat.ACTIVE)  # their turn has come
WORDS: Final = {
    Status.FREE: "no container has it",
    Status.STARTING: "its container is being started",
    Status.SUSPENDED: "nothing asks for it: `kybernate wake` does",
    Status.PARKED: "nothing asks for it: `kybernate wake` does",
    Status.FAILED: "it could not be woken; `kybernate wake` tries again",
    Status.SUSPENDING: "its VRAM is being offloaded",
    Status.PARKING: "its memory is being moved below host memory",
    Status.WAKING: "its VRAM is being reloaded",
}


def seat_message(
    place: Place,
    seat: Seat,
    key: Key | None,
    turn: Turn | None,
    *,
    title: str = "",
    error: str = "",
) -> wire.Seat:
    """Return the message; `turn` is why it waits, None where it does not."""
    created = seat.status == Status.FREE and key is not None
    default = "its container is created and not started" if created else WORDS.get(seat.status, "")
    found = wire.Seat(
        name=place.name,
        profile=place.profile.name,
        group=place.group.name,
        gpus=place.group.gpus,
        status=STATUSES[seat.status],
        namespace=key[0] if key else "",
        container=key[1] if key else "",
        container_title=title,
        priority=seat.priority,
        kind=seat.kind,
        need_bytes=seat.need_bytes,
        held_bytes=seat.held_bytes,
        busy=seat.busy,
        reason=turn.reason if turn is not None else default,
        before=turn.before if turn is not None else (),
        failures=seat.failures,
        error=error[:MOST_TEXT],
        stands_by_for=seat.stands_by_for,
        lost=seat.lost,
    )
    _set(found.since, seat.since)
    _set(found.retry_at, seat.retry_at)
    _set(found.turn_at, turn.at if turn is not None else 0.0)
    for one in seat.requests:
        asked = found.requests.add(cause=one.cause)
        _set(asked.at, one.at)
        _set(asked.deadline, one.deadline)
    return found


def schedule_of(seats: list[wire.Seat]) -> wire.Schedule:
    """Return when waiting seats have their turns, as far as that is known, the next first."""
    waiting = [one for one in seats if one.requests and one.status not in IN_TURN]
    found = wire.Schedule()
    for seat in sorted(waiting, key=lambda one: (not one.HasField("turn_at"), one.turn_at.ToMicroseconds(), one.name)):
        turn = found.turns.add(
            seat=seat.name, reason=seat.reason, before=seat.before, container_title=seat.container_title
        )
        if seat.HasField("turn_at"):
            turn.at.CopyFrom(seat.turn_at)
    return found


def _set(stamp: Timestamp, seconds: float) -> None:
    """Set a time; 0 and NEVER are none."""
    if 0 < seconds < NEVER:
        stamp.FromMicroseconds(round(seconds * 1e6))

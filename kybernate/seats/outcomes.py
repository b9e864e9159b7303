"""What begins and ends with a seat: how an action, its outcome and a request change what the arbiter knows of it."""

from __future__ import annotations

from dataclasses import replace

from kybernate.seats.model import (
    Action,
    Park,
    Refuse,
    Request,
    Rules,
    Seat,
    Start,
    State,
    Status,
    Suspend,
    Swap,
    Wake,
)


def requested(seat: Seat, request: Request) -> Seat:
    """Return a seat with one more request; one that is active has none open, because it serves them.

    Requests of one seat are served together: the first counts for how long it has waited, the others keep their
    deadlines.
    """
    if seat.status == Status.ACTIVE:
        return seat
    return replace(seat, requests=(*seat.requests, request))


def begun(state: State, action: Action, now: float) -> State:
    """Return the state once an action has begun."""
    seat = state.seats[action.seat]
    match action:
        case Start():
            return state.with_seat(seat.after("start", now))
        case Wake():
            return state.with_seat(seat.after("wake", now))
        case Park():
            return state.with_seat(seat.after("park", now))
        case Suspend():
            return _claimed(state, seat).with_seat(_leaving(seat, now, action.again))
        case Swap():
            out = _leaving(state.seats[action.out], now, action.again)
            state = _claimed(state, out).with_seat(replace(out, partner=seat.name))
            return state.with_seat(replace(seat.after("wake", now), partner=out.name))
        case Refuse():
            kept = tuple(one for one in seat.requests if one.deadline > now)
            return state.with_seat(replace(seat, requests=kept))


def _claimed(state: State, seat: Seat) -> State:
    """Return the state with host memory claimed for a seat's VRAM."""
    return replace(state, ram_free_bytes=state.ram_free_bytes - seat.ram_bytes)


def _leaving(seat: Seat, now: float, again: bool) -> Seat:
    """Return a seat that is being suspended; one that was at work asks for its next time in VRAM from now on."""
    left = seat.after("suspend", now)
    return replace(left, requests=(Request(now, "preempted"),)) if again else left


def done(seat: Seat, now: float) -> Seat:
    """Return a seat whose change has been done. One that is active now serves its requests."""
    found = replace(seat.after("done", now), failures=0, retry_at=0.0, partner="")
    if found.status != Status.ACTIVE:
        return found
    asked = seat.requests[0].at if seat.requests else now
    return replace(found, requests=(), asked_at=asked, idle_since=now)


def failed(seat: Seat, now: float, rules: Rules) -> Seat:
    """Return a seat whose change has failed: it is what it was before, and is tried again after a while.

    A wake that failed more often than the rules allow fails the seat's requests. A park that failed delays none.
    """
    if seat.status == Status.PARKING:
        return replace(seat.after("failed", now), park_at=now + rules.backoff_limit)
    failures = seat.failures + 1
    delay = min(rules.backoff_limit, rules.backoff * 2 ** min(failures - 1, 30))
    found = replace(seat.after("failed", now), failures=failures, retry_at=now + delay, partner="")
    if seat.status == Status.WAKING and failures > rules.retries:
        return replace(found, status=Status.FAILED, requests=())
    if found.status == Status.ACTIVE:  # it has its VRAM, and needs no request for it
        return replace(found, requests=(), idle_since=seat.idle_since)
    return found

"""Nodes with seats for tests: a few words for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kybernate.seats.decide import decide
from kybernate.seats.model import Action, Decision, Gpu, Request, Rules, Seat, State, Status

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC, a Friday
GIB = 1 << 30
LONG = 100_000.0  # seconds: longer than any rule


def gpus(count: int = 1, size: int = 80 * GIB, **more: Any) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, size, size, **more) for index in range(count))


def seat(name: str, *on: int, status: Status = Status.SUSPENDED, since: float = LONG, **more: Any) -> Seat:
    """Return a seat on these GPUs (the first where none is named), in its status for `since` seconds."""
    mask = sum(1 << one for one in on or (0,))
    made = Seat(name, "g", mask, status, NOW - since, container=name, idle_since=NOW - since)
    return replace(made, **more)


def active(name: str, *on: int, busy: bool = True, **more: Any) -> Seat:
    return seat(name, *on, status=Status.ACTIVE, busy=busy, **more)


def waiting(name: str, *on: int, ago: float = 1.0, cause: str = "api", **more: Any) -> Seat:
    """Return a suspended seat that was asked for some seconds ago."""
    return seat(name, *on, requests=(Request(NOW - ago, cause),), **more)


def state(*seats: Seat, rules: Rules | None = None, count: int = 2, **more: Any) -> State:
    return State.of(more.pop("gpus", gpus(count)), seats, rules or Rules(), **more)


def decided(*seats: Seat, now: float = NOW, **more: Any) -> Decision:
    return decide(state(*seats, **more), now)


def actions(*seats: Seat, **more: Any) -> tuple[Action, ...]:
    return decided(*seats, **more).actions


def shown(*seats: Seat, **more: Any) -> list[str]:
    """Return the actions in short: `wake a`, `swap a b`."""
    return [
        " ".join([type(one).__name__.lower(), one.seat, *([one.out] if hasattr(one, "out") else [])])
        for one in actions(*seats, **more)
    ]

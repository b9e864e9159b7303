"""The agent's seats as `kybernate up` knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kybernate.client import AgentUnreachable
from kybernate.messages import agent_pb2 as wire
from kybernate.proxy.holding import Phase
from kybernate.up.lifecycle import Done
from kybernate.up.models_file import parse
from kybernate.up.room import Room
from kybernate.up.seats import Seats
from kybernate.up.source import KeptModels
from kybernate.up.steps import Kept

BEGIN = wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN)
END = wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END)


def seat(name: str, container: str = "", *, crowded: bool = False, removed: bool = False) -> wire.Change:
    return wire.Change(seat=wire.Seat(name=name, profile="one", container=container, crowded=crowded), removed=removed)


def seats_after(*changes: wire.Change) -> Seats:
    seats = Seats(cast(Any, None))
    for change in changes:
        seats.take(change)
    return seats


def test_crowded_is_what_the_arbiter_says_of_a_containers_seat() -> None:
    seats = seats_after(BEGIN, seat("s0", "a"), seat("s1", "b", crowded=True), END)
    assert seats.there
    assert not seats.crowded("one", "a")
    assert seats.crowded("one", "b")
    seats.take(seat("s1", "b"))
    assert not seats.crowded("one", "b")


def test_container_without_a_seat_is_crowded_where_none_is_left() -> None:
    seats = seats_after(BEGIN, seat("s0", "a"), seat("s1"), END)
    assert not seats.crowded("one", "")
    seats.take(seat("s1", "b"))
    assert seats.crowded("one", "")
    assert seats.crowded("one", "c")
    seats.take(seat("s1", removed=True))
    seats.take(seat("s0", removed=True))
    assert not seats.there


def test_snapshot_replaces_what_was_known() -> None:
    seats = seats_after(BEGIN, seat("s0", "a"), END, BEGIN)
    assert seats.there  # until the new one is whole
    seats.take(END)
    assert not seats.there


def test_seats_are_followed_over_a_loss_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kybernate.up.seats.AGAIN_SECONDS", 0.001)
    told: list[Sequence[wire.Change]] = [[BEGIN, seat("s0", "a"), END], [BEGIN, seat("s0", "a", crowded=True), END]]
    done = asyncio.Event()

    async def watch(kinds: Sequence[str]) -> AsyncIterator[wire.Change]:
        assert kinds == ("seat",)
        if not told:
            done.set()
            await asyncio.Event().wait()
        for change in told.pop(0):
            yield change
        raise AgentUnreachable("the agent is away")

    async def listed(*, all: bool) -> list[wire.Seat]:
        return [wire.Seat(name="s0", profile="one", container="a")]

    async def followed() -> None:
        async with Seats(cast(Any, SimpleNamespace(watch=watch, seats=listed))) as seats:
            assert seats.there
            await asyncio.wait_for(done.wait(), 20)
            assert seats.crowded("one", "a")

    asyncio.run(followed())


def test_model_with_a_seat_is_crowded_by_the_arbiters_word() -> None:
    (entry,) = parse("models: {m: {image: x, gpus: [0], seat: one}}", "models.yaml", {}).models
    asked: list[tuple[str, str]] = []

    def is_crowded(profile: str, container: str) -> bool:
        asked.append((profile, container))
        return True

    async def crowded(*, seats: bool) -> bool:
        room = Room(cast(Any, None), list, lambda name: None, lambda: seats)
        kept = Kept(entry, done=Done(settled=True), container="c1")
        source = KeptModels(cast(Any, None), cast(Any, SimpleNamespace(models={"m": kept}, room=room)), ())
        source.engine = cast(Any, SimpleNamespace(held={"m": SimpleNamespace(phase=Phase.ASLEEP)}))
        source.seat_is_crowded = is_crowded
        return source.crowded("m")

    assert asyncio.run(crowded(seats=True))
    assert asked == [("one", "c1")]
    assert not asyncio.run(crowded(seats=False))  # sizes decide, and there is no GPU

"""Room on GPUs has one owner: takers wait in their order, what they wait for is shown, and shims ask as verbs do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kybernate.agent.room import RoomOwner
from kybernate.agent.service.for_shims import RoomForShims
from kybernate.verbs.room import OPEN, Room, Taker
from kybernate_shim.errors import Refused
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task import room as asking
from kybernate_shim.ttrpc import Server

A, B, C = (Taker("default", name, ("GPU-1",)) for name in "abc")


def one_at_a_time(taker: Taker, before: Sequence[Taker]) -> str:
    return f"after {', '.join(one.container for one in before)}" if before else ""


class Said:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.shown: list[tuple[str, str]] = []

    def note(self, type: str, level: str, message: str, /, **about: str) -> None:
        self.events.append(f"{type} {about['container']}")

    def show(self, taker: Taker, reason: str) -> None:
        self.shown.append((taker.container, reason))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  # the owner has no event for tests; the caller has a deadline
        await asyncio.sleep(0)


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener


async def take(room: Room, taker: Taker, order: list[str], release: asyncio.Event, heard: list[str]) -> None:
    async with room.taken(taker, heard.append):
        order.append(taker.container)
        await release.wait()


def test_takers_wait_in_their_order_and_what_they_wait_for_is_shown() -> None:
    said, order, heard = Said(), list[str](), list[str]()

    async def work() -> None:
        owner, release = RoomOwner(said.note, said.show, one_at_a_time), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for taker in (A, B, C):
                tasks.create_task(take(owner, taker, order, release, heard))
                await asyncio.sleep(0)
            await until(lambda: len(said.events) == 2)
            assert [one.container for one in owner.waiting] == ["b", "c"]
            assert order == ["a"]
            release.set()

    asyncio.run(asyncio.wait_for(work(), 30))
    assert order == ["a", "b", "c"]
    assert heard[:2] == ["after a", "after a, b"]
    assert said.events[:2] == ["room.awaited b", "room.awaited c"]
    assert [one for one in said.events if one.startswith("room.granted")] == ["room.granted b", "room.granted c"]
    assert {("b", ""), ("c", "")} <= set(said.shown)


def test_taker_that_goes_away_makes_way() -> None:
    said, order = Said(), list[str]()

    async def work() -> None:
        owner, release = RoomOwner(said.note, said.show, one_at_a_time), asyncio.Event()
        first = asyncio.create_task(take(owner, A, order, release, []))
        await asyncio.sleep(0)
        second = asyncio.create_task(take(owner, B, order, release, []))
        await until(lambda: bool(owner.waiting))
        second.cancel()
        await asyncio.wait({second})
        assert owner.waiting == ()
        first.cancel()
        await asyncio.wait({first})
        async with owner.taken(C, lambda reason: pytest.fail(reason)):
            pass

    asyncio.run(asyncio.wait_for(work(), 30))


def test_shim_that_starts_what_an_operation_restores_has_its_room() -> None:
    async def work() -> None:
        owner = RoomOwner(Said().note, grant=one_at_a_time)
        async with AsyncExitStack() as held:
            for _ in range(2):
                await held.enter_async_context(owner.taken(A, lambda reason: pytest.fail(reason)))

    asyncio.run(asyncio.wait_for(work(), 30))


def test_room_without_an_owner_lets_all_in() -> None:
    async def work() -> None:
        async with OPEN.taken(A, pytest.fail), OPEN.taken(B, pytest.fail):
            pass

    asyncio.run(work())


WITH_GPU = Spec({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"]}})


def test_shim_asks_for_a_container_with_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, asked = tmp_path / "images.sock", list[Taker]()
    monkeypatch.setattr(asking, "IMAGES_SOCKET", place)

    def grant(taker: Taker, before: Sequence[Taker]) -> str:
        asked.append(taker)
        return ""

    async def work() -> None:
        await asking.take(WITH_GPU, "k8s.io", "web")  # no agent runs
        server = Server(RoomForShims(RoomOwner(Said().note, grant=grant)).services())
        await server.start(listening(place))
        try:
            await asking.take(Spec({}), "k8s.io", "without")
            await asking.take(Spec({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}), "k8s.io", "void")
            await asking.take(WITH_GPU, "k8s.io", "web")
        finally:
            await server.close(grace=0)

    asyncio.run(asyncio.wait_for(work(), 30))
    assert asked == [Taker("k8s.io", "web", ("GPU-1", "GPU-2"))]


def test_room_that_does_not_come_in_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "images.sock"
    monkeypatch.setattr(asking, "IMAGES_SOCKET", place)
    monkeypatch.setattr(asking, "SECONDS", 0.1)

    async def work() -> None:
        server = Server(RoomForShims(RoomOwner(Said().note, grant=lambda taker, before: "it is full")).services())
        await server.start(listening(place))
        try:
            with pytest.raises(Refused, match="found no room on its GPUs"):
                await asking.take(WITH_GPU, "k8s.io", "web")
        finally:
            await server.close(grace=0)

    asyncio.run(asyncio.wait_for(work(), 30))


SEATED = Spec({"annotations": {"kyb.ai/seat": "g0-s0"}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}})


def test_container_with_a_seat_waits_for_an_agent_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, waits = tmp_path / "images.sock", tmp_path / "seats-wait"
    monkeypatch.setattr(asking, "IMAGES_SOCKET", place)
    monkeypatch.setattr(asking, "SEATS_WAIT", waits)
    asked = list[Taker]()

    def grant(taker: Taker, before: Sequence[Taker]) -> str:
        asked.append(taker)
        return ""

    async def work() -> None:
        await asking.take(SEATED, "k8s.io", "web")  # the configuration lets it start
        waits.touch()
        waiting = asyncio.create_task(asking.take(SEATED, "k8s.io", "web"))
        await asyncio.sleep(0)
        assert not waiting.done()
        server = Server(RoomForShims(RoomOwner(Said().note, grant=grant)).services())
        await server.start(listening(place))
        try:
            await waiting
        finally:
            await server.close(grace=0)

    asyncio.run(asyncio.wait_for(work(), 30))
    assert asked == [Taker("k8s.io", "web", ())]


def test_container_with_a_seat_is_refused_where_no_agent_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = tmp_path / "seats-wait"
    waits.touch()
    monkeypatch.setattr(asking, "IMAGES_SOCKET", tmp_path / "images.sock")
    monkeypatch.setattr(asking, "SEATS_WAIT", waits)
    monkeypatch.setattr(asking, "SEAT_SECONDS", 0.1)
    with pytest.raises(Refused, match="the node's agent does not answer in"):
        asyncio.run(asyncio.wait_for(asking.take(SEATED, "k8s.io", "web"), 30))


def test_a_seat_has_its_own_turn_within_an_operation() -> None:
    """An operation restores a container with a seat; its shim's start waits for the seat, and not for the operation."""

    async def work() -> None:
        free = asyncio.Event()
        owner = RoomOwner(
            Said().note,
            grant=lambda taker, before: "" if taker.operation or free.is_set() else "its turn",
            seated=lambda namespace, container: True,
        )
        async with owner.taken(Taker("default", "a", operation="1"), lambda reason: None):
            heard, order = list[str](), list[str]()
            starting = asyncio.create_task(take(owner, Taker("default", "a"), order, free, heard))
            await until(lambda: heard == ["its turn"])
            free.set()
            owner.look_again()
            await starting
            assert order == ["a"]

    asyncio.run(asyncio.wait_for(work(), 30))

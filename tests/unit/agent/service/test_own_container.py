"""The service on the restricted socket, over an engine that only remembers: what a container can make it do."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.access.caller import CALLER, Caller, OwnContainer, Role
from kybernate.agent.inventory.gpus import Activity
from kybernate.agent.keeping.parking import PARKED
from kybernate.agent.operations.store import Wanted
from kybernate.agent.service import idle, quota
from kybernate.agent.service.idle import Idleness
from kybernate.agent.service.own_container import Own, image_name, place_of
from kybernate.agent.service.quota import Quota, QuotaReached
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Denied, Exhausted, Failure, Invalid, Missing, Unavailable
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.model import Operation, State, Submission, Target
from kybernate.verbs.suspend import Suspend
from tests.unit.agent.access.conftest import soon

MINE = OwnContainer("k8s.io", "c1", "team", "pod", "app")
OTHERS = OwnContainer("k8s.io", "c2", "other", "pod", "app")


class Engine:
    """Takes every submission."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}

    async def submit(self, wanted: Submission) -> Operation:
        await asyncio.sleep(0)  # as the journal takes its time
        id = f"op{len(self.operations)}"
        arguments: Any = wanted.arguments
        target = Target(arguments.namespace, arguments.name, image=getattr(arguments, "path", ""))
        one = Operation(
            id, wanted.arguments, target, 0.0, requester=wanted.requester, key=wanted.key, scope=wanted.scope
        )
        self.operations[id] = one
        return one

    async def get(self, id: str) -> Operation:
        if id not in self.operations:
            raise Missing(f"no operation {id}")
        return self.operations[id]

    async def list(self, wanted: Wanted) -> list[Operation]:
        return [one for one in self.operations.values() if one.state in wanted.states]

    async def cancel(self, id: str) -> Operation:
        self.end(id, State.CANCELLED)
        return self.operations[id]

    def end(self, id: str, state: State = State.SUCCEEDED) -> None:
        self.operations[id] = replace(self.operations[id], state=state)


class World:
    def __init__(self, root: Path) -> None:
        self.engine, self.idleness, self.limit = Engine(), Idleness(), 1 << 30
        self.activities: dict[OwnContainer, Activity] = {}
        self.looks, self.computes = 0, False
        self.everybody: dict[str, wire.Container] = {}
        self.known = wire.Container(
            namespace="k8s.io",
            id="c1",
            pid=4711,
            note="of the node",
            runtime="io.containerd.x",
            state=wire.Container.RUNNING,
        )
        self.service = Own(
            self.engine,  # type: ignore[arg-type]
            lambda own: self.known if own.id == "c1" else self.everybody.get(own.id),
            lambda: root,
            Quota(lambda: self.limit),
            self.idleness,
            self.look,
        )

    async def look(self, own: OwnContainer) -> Activity:
        self.looks += 1
        return Activity(self.looks) if self.computes else self.activities.get(own, Activity())

    async def checkpoint(self, own: OwnContainer = MINE, *, key: str = "", exit: bool = False) -> wire.Operation:
        request = wire.SelfCheckpointRequest(exit=exit, options=wire.Options(idempotency_key=key))
        return await called(own, self.service.Checkpoint(request, None))

    async def suspend(self, seconds: float, own: OwnContainer = MINE) -> wire.Operation:
        request = wire.SuspendWhenIdleRequest()
        request.idle.FromMilliseconds(round(seconds * 1000))
        return await called(own, self.service.SuspendWhenIdle(request, None))

    async def get(self, id: str, own: OwnContainer = MINE) -> wire.Operation:
        return await called(own, self.service.GetOperation(wire.GetOperationRequest(id=id), None))

    async def cancel(self, id: str, own: OwnContainer = MINE) -> wire.Operation:
        return await called(own, self.service.CancelOperation(wire.CancelOperationRequest(id=id), None))


async def called(own: OwnContainer, call: Coroutine[Any, Any, Any]) -> Any:
    async def as_caller() -> Any:
        CALLER.set(Caller(Role.CONTAINER, 0, os.getpid(), container=own))
        return await call

    return await asyncio.create_task(as_caller())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_container_sees_itself_and_nothing_of_the_node(world: World) -> None:
    found = asyncio.run(called(MINE, world.service.GetSelf(wire.GetSelfRequest(), None)))
    assert (found.id, found.state) == ("c1", wire.Container.RUNNING)
    assert (found.pid, found.note, found.runtime) == (0, "", "")


def test_checkpoint_is_of_the_caller_in_the_directory_of_its_namespace(world: World, tmp_path: Path) -> None:
    operation = asyncio.run(world.checkpoint(exit=True))
    (submitted,) = world.engine.operations.values()
    assert isinstance(submitted.arguments, Checkpoint)
    assert (submitted.arguments.name, submitted.arguments.namespace, submitted.arguments.exit) == ("c1", "k8s.io", True)
    assert submitted.arguments.force is False
    path = Path(submitted.arguments.path)
    assert path.parent == tmp_path / "team"
    assert path.name.startswith("self-app-")
    assert operation.requester == f"container c1 (pid {os.getpid()})"
    assert submitted.scope == "container k8s.io/c1"


def test_second_operation_of_a_container_waits_for_the_end_of_the_first(world: World) -> None:
    async def main() -> None:
        first, *refused = await asyncio.gather(*(world.checkpoint() for _ in range(3)), return_exceptions=True)
        assert isinstance(first, wire.Operation)
        assert [type(one) for one in refused] == [Exhausted, Exhausted]
        await world.checkpoint(OTHERS)
        world.engine.end(first.id)
        await world.checkpoint()

    asyncio.run(main())


def test_repetition_with_its_key_is_the_same_operation(world: World) -> None:
    async def main() -> None:
        first = await world.checkpoint(key="a")
        assert (await world.checkpoint(key="a")).id == first.id
        with pytest.raises(Exhausted, match="has not ended"):
            await world.checkpoint(key="b")

    asyncio.run(main())


def test_operations_of_others_can_be_neither_seen_nor_ended(world: World) -> None:
    async def main() -> None:
        theirs = await world.checkpoint(OTHERS)
        for attempt in (world.get(theirs.id), world.cancel(theirs.id)):
            with pytest.raises(Denied, match=r"was started by|of this container"):
                await attempt
        with pytest.raises(Missing, match=r"no operation"):
            await world.get("nothing")
        assert (await world.get(theirs.id, OTHERS)).id == theirs.id

    asyncio.run(main())


def test_operation_that_root_began_on_the_container_is_seen_and_not_ended(world: World) -> None:
    async def main() -> None:
        roots = await world.engine.submit(Submission(Suspend("c1", "k8s.io"), "uid 0 (pid 1)"))
        assert (await world.get(roots.id)).id == roots.id
        with pytest.raises(Denied, match="was started by uid 0"):
            await world.cancel(roots.id)
        assert world.engine.operations[roots.id].state == State.PENDING

    asyncio.run(main())


def test_own_operation_is_cancelled(world: World) -> None:
    async def main() -> None:
        mine = await world.checkpoint()
        assert (await world.cancel(mine.id)).state == wire.CANCELLED

    asyncio.run(main())


def test_images_of_a_namespace_have_a_limit(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "memory_of", lambda pid: 1000 if pid == 4711 else 1 << 40)
    (tmp_path / "team" / "self-old").mkdir(parents=True)
    (tmp_path / "team" / "self-old" / "pages").write_bytes(os.urandom(100_000))
    (tmp_path / "team" / "of-root").mkdir()
    (tmp_path / "team" / "of-root" / "pages").write_bytes(os.urandom(1_000_000))
    (tmp_path / "team" / "self-link").symlink_to(tmp_path / "team" / "of-root")
    world.limit = 120_000
    asyncio.run(world.checkpoint())
    world.engine.end("op0")
    world.limit = 100_500
    with pytest.raises(QuotaReached, match="up to 1000"):
        asyncio.run(world.checkpoint())
    assert len(world.engine.operations) == 1


def test_containers_of_a_namespace_share_its_limit_while_they_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [replace(MINE, id=f"d{number}", name=f"app-{number}") for number in range(4)]
    world.everybody = {own.id: wire.Container(namespace="k8s.io", id=own.id, pid=5000) for own in others}
    monkeypatch.setattr(quota, "memory_of", lambda pid: 1000)
    world.limit = 2500

    async def main() -> None:
        ended = await asyncio.gather(*map(world.checkpoint, others), return_exceptions=True)
        assert [isinstance(one, QuotaReached) for one in ended].count(True) == 2
        assert len(world.engine.operations) == 2
        world.engine.end("op0")  # an image that takes nothing
        await world.checkpoint(next(own for own, one in zip(others, ended, strict=True) if isinstance(one, Exception)))

    asyncio.run(main())


def test_container_sets_no_label_that_means_something_to_the_agent(world: World) -> None:
    for name in (PARKED, "kybernate.io/anything"):
        request = wire.SelfCheckpointRequest(options=wire.Options(labels={name: "x", "mine": "y"}))
        with pytest.raises(Invalid, match="which containers may not set"):
            asyncio.run(called(MINE, world.service.Checkpoint(request, None)))
    request = wire.SelfCheckpointRequest(options=wire.Options(labels={"mine": "y"}))
    asyncio.run(called(MINE, world.service.Checkpoint(request, None)))


def test_container_without_a_pod_has_its_images_beside_others(tmp_path: Path) -> None:
    assert place_of(OwnContainer("default", "c1"), tmp_path) == tmp_path


@given(st.text())
def test_no_namespace_leads_out_of_the_directory_of_images(namespace: str) -> None:
    root = Path("/images")
    try:
        place = place_of(replace(MINE, pod_namespace=namespace), root)
    except Failure:
        return
    assert place.parent == root
    assert Path(os.path.normpath(place)) == place


@given(st.text(), st.text(min_size=1), st.text())
def test_no_name_leads_out_of_the_namespace(name: str, id: str, key: str) -> None:
    found = image_name(OwnContainer("k8s.io", id, "team", "pod", name), key)
    assert re.fullmatch(r"self-[-a-z0-9]+", found)
    assert len(found) < 128
    assert not key or found == image_name(OwnContainer("k8s.io", id, "team", "pod", name), key)


def test_container_that_computes_is_not_idle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "LOOK_SECONDS", 0.01)

    async def main() -> None:
        world.computes = True
        waiting = await world.suspend(0.05)
        await soon(lambda: world.looks > 20)  # of a program that makes no call, for longer than it asked for
        assert world.engine.operations == {}
        assert (await world.get(waiting.id)).state == wire.PENDING
        world.computes = False
        await soon(lambda: world.engine.operations)

    asyncio.run(main())


def test_work_of_other_containers_does_not_count(world: World) -> None:
    async def main() -> None:
        await world.suspend(0.05)
        world.activities[OTHERS] = Activity(mark=7)
        await soon(lambda: world.engine.operations)

    asyncio.run(main())


def test_gpus_of_which_nothing_is_known_are_named(world: World) -> None:
    async def main() -> None:
        world.activities[MINE] = Activity(unknown=("GPU-1",))
        waiting = await world.suspend(0.05)
        await soon(lambda: world.engine.operations)
        assert "NVML does not report work on GPU-1" in " ".join(waiting.notes)

    asyncio.run(main())


def test_container_that_is_silent_is_suspended(world: World) -> None:
    async def main() -> None:
        waiting = await world.suspend(0.05)
        assert (waiting.verb, waiting.state, waiting.container) == ("suspend", wire.PENDING, "c1")
        assert (await world.get(waiting.id)).state == wire.PENDING
        await soon(lambda: world.engine.operations)
        (submitted,) = world.engine.operations.values()
        assert submitted.arguments == Suspend("c1", "k8s.io")
        assert (await world.get(waiting.id)).id == submitted.id
        assert (await world.cancel(waiting.id)).id == submitted.id
        assert world.engine.operations[submitted.id].state == State.CANCELLED

    asyncio.run(main())


def test_call_of_the_container_ends_the_wait_and_that_of_another_does_not(world: World) -> None:
    async def main() -> None:
        waiting = await world.suspend(3600)
        await called(OTHERS, world.service.GetSelf(wire.GetSelfRequest(), None))
        assert (await world.get(waiting.id)).state == wire.PENDING
        with pytest.raises(Missing, match=r"no operation"):
            await world.get(waiting.id, OTHERS)
        await called(MINE, world.service.GetSelf(wire.GetSelfRequest(), None))
        assert (await world.get(waiting.id)).state == wire.CANCELLED
        assert not world.engine.operations

    asyncio.run(main())


def test_wait_is_cancelled_by_its_id_and_repeated_by_its_key(world: World) -> None:
    async def main() -> None:
        request = wire.SuspendWhenIdleRequest(options=wire.Options(idempotency_key="k"))
        first = await called(MINE, world.service.SuspendWhenIdle(request, None))
        again = await called(MINE, world.service.SuspendWhenIdle(request, None))
        assert first.id == again.id
        other = await world.suspend(3600)
        assert other.id != first.id
        assert (await world.cancel(other.id)).state == wire.CANCELLED

    asyncio.run(main())


def test_suspend_that_is_refused_in_the_end_says_why(world: World) -> None:
    async def main() -> None:
        waiting = await world.suspend(0.05)
        await world.engine.submit(Submission(Suspend("c1", "k8s.io"), "uid 0 (pid 1)"))
        await soon(lambda: world.idleness.find("container k8s.io/c1", waiting.id).state == wire.FAILED)  # type: ignore[union-attr]
        assert (await world.get(waiting.id)).error.type == "Exhausted"

    asyncio.run(main())


def test_end_of_the_agent_ends_the_waits(world: World) -> None:
    async def main() -> None:
        waiting = await world.suspend(3600)
        world.idleness.stop()
        assert (await world.get(waiting.id)).state == wire.CANCELLED
        with pytest.raises(Unavailable, match="agent is stopping"):
            await world.suspend(0.01)

    asyncio.run(main())

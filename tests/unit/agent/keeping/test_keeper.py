"""The keeper sees what there is, submits what is decided once, and is not stopped by what does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kybernate.agent.journal import Journal
from kybernate.agent.keeping import gather, keeper
from kybernate.agent.keeping.keeper import Keeper
from kybernate.agent.keeping.parking import PARKED
from kybernate.agent.keeping.uses import KEPT_SECONDS, MOST, SCHEMA, Uses
from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.node_tiers import NodeTiers
from kybernate.agent.tier_settings import Policy, Ram, Tiers
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.registry.model import Annotations, ImageRow, Replica
from kybernate.verbs.copy import Copy
from kybernate.verbs.evict import Evict
from kybernate.verbs.model import Operation, Submission, Target
from kybernate.verbs.restore import Restore
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.config import Config

MIB = 1 << 20
CREATED = datetime(2026, 11, 1, tzinfo=UTC)


def row(id: str, *places: tuple[str, str, str], pinned: bool = False, mib: int = 10) -> ImageRow:
    """Return an image whose replicas are (node, tier, place)."""
    replicas = tuple(Replica(node, place, tier, f"web-{id}", bytes=mib * MIB) for node, tier, place in places)
    annotations = Annotations(1, workload="web", pinned=pinned)
    return ImageRow(f"sha256:{id}", id, CREATED, Source("c", "team-a"), mib * MIB, annotations=annotations,
                    replicas=replicas)  # fmt: skip


class Engine:
    """An engine that takes every request, or refuses all."""

    def __init__(self) -> None:
        self.submitted: list[Submission] = []
        self.running: list[Operation] = []
        self.refuses = False

    async def submit(self, submission: Submission) -> Operation:
        if self.refuses:
            raise Failure("no")
        self.submitted.append(submission)
        return Operation(f"op{len(self.submitted)}", submission.arguments, Target(), 0.0)

    async def list(self, wanted: object) -> Sequence[Operation]:
        return self.running


class World:
    """A keeper with all that it asks."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.engine, self.rows, self.containers = Engine(), list[ImageRow](), list[wire.Container]()
        self.memory = wire.HostMemory()
        self.ram, self.disk = place / "ram", place / "disk"
        for directory in (self.ram, self.disk):
            directory.mkdir()
        self.settings = Tiers(**settings)
        config = replace(Config(), checkpoint_root=self.disk, memory_root=self.ram)
        self.stored = StoreSettings()
        tiers = NodeTiers(lambda: config, lambda: self.stored, lambda: self.settings, place)
        journal = Journal(place / "journal", SCHEMA)
        log = structlog.get_logger()
        self.uses = Uses(journal, lambda operation: "team-a/web", log)
        hub = SimpleNamespace(objects=lambda kind: self.containers)
        catalogue = SimpleNamespace(
            list=lambda wanted, limit, token: SimpleNamespace(images=self._listed(wanted), token=""),
            get=lambda id: next(one for one in self.rows if one.id == id),
        )
        self.keeper = Keeper(
            self.engine, hub, lambda: catalogue, tiers, self.uses, lambda: self.settings, lambda: self.memory,
            "node-1", log,
        )  # type: ignore[arg-type]  # fmt: skip

    def _listed(self, wanted: Any) -> list[ImageRow]:
        return [one for one in self.rows if any(replica.node == wanted.node for replica in one.replicas)]

    def on(self, tier: str, id: str) -> tuple[str, str, str]:
        return ("node-1", tier, f"{getattr(self, tier)}/team-a/web-{id}")

    def step(self) -> list[object]:
        """Let it decide once; return what it has submitted."""
        before = len(self.engine.submitted)
        asyncio.run(self.keeper.step())
        return [one.arguments for one in self.engine.submitted[before:]]


def test_what_lies_in_memory_alone_is_copied_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.rows = [row("1", world.on("ram", "1")), row("2", world.on("ram", "2"), world.on("disk", "2"))]
    assert world.step() == [Copy(f"{world.ram}/team-a/web-1", "disk", "demotion")]
    assert world.step() == []  # it runs
    (submission,) = world.engine.submitted
    assert submission.requester == "policy"
    assert submission.labels["kybernate.io/reason"]


def test_copy_that_runs_is_not_planned_by_the_next_agent(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.rows = [row("1", world.on("ram", "1"))]
    target = Target(image="1", ref=("team-a", "web-1", "1"))
    world.engine.running = [Operation("op", Copy("1", "disk"), target, 0.0)]
    assert world.step() == []


def test_memory_above_its_watermark_is_relieved_of_what_is_not_pinned_or_read(tmp_path: Path) -> None:
    world = World(tmp_path, ram=Ram(quota=40 * MIB, high=0.7, low=0.6), policy=Policy(prefetch=False))
    pairs = [(world.on("ram", id), world.on("disk", id)) for id in "123"]
    world.rows = [row("1", *pairs[0], pinned=True), row("2", *pairs[1]), row("3", *pairs[2])]
    reading = Target(image=pairs[1][0][2])
    world.engine.running = [Operation("op", Restore("2"), reading, 0.0)]
    assert world.step() == [Evict(f"{world.ram}/team-a/web-3", "ram")]


def test_store_that_is_silent_holds_no_decision_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as away until it has answered; the look lasts for several decisions."""
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.01)
    world = World(tmp_path, ram=Ram(quota=60 * MIB, high=0.5, low=0.4))
    world.stored = StoreSettings(url="s3://silent")
    world.rows = [row("1", world.on("ram", "1"), world.on("disk", "1"), mib=40)]
    looks: list[asyncio.Event] = []

    async def scenario() -> None:
        async def silent() -> SimpleNamespace:
            looks.append(asyncio.Event())
            await looks[-1].wait()
            return SimpleNamespace(room=asyncio.Event().wait)

        monkeypatch.setattr(world.keeper._tiers, "object", silent)
        for _ in range(2):
            await world.keeper.step()
        world.keeper._looking.cancel()  # type: ignore[union-attr]

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert [one.arguments for one in world.engine.submitted] == [Evict(f"{world.ram}/team-a/web-1", "ram")]
    assert len(looks) == 1


def test_refused_action_is_not_repeated_immediately(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.rows = [row("1", world.on("ram", "1"))]
    world.engine.refuses = True
    assert world.step() == []
    world.engine.refuses = False
    assert world.step() == []
    world.keeper._attempts.first = 0.0
    assert world.step() == [Copy(f"{world.ram}/team-a/web-1", "disk", "demotion")]


def test_suspended_container_without_a_pod_is_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, policy=Policy(park_after=100.0))
    alone = wire.Container(namespace="default", id="c1", gpu="SUSPENDED", vram_bytes=MIB)
    of_a_pod = wire.Container(namespace="k8s.io", id="c2", gpu="SUSPENDED", pod="p", pod_namespace="team-a")
    world.containers = [alone, of_a_pod, wire.Container(namespace="default", id="c3", gpu="ATTACHED")]
    assert world.step() == []  # since now
    now = keeper.time.time()
    monkeypatch.setattr(world.keeper, "_clock", SimpleNamespace(read=lambda: (now + 200, True)))
    (parked,) = world.step()
    assert (parked.name, parked.namespace, parked.exit) == ("c1", "default", True)  # type: ignore[attr-defined]
    assert world.engine.submitted[-1].labels[PARKED] == "c1"


def test_clock_that_jumped_is_not_believed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = [1000.0], [50.0]
    monkeypatch.setattr(keeper.time, "time", lambda: wall[0])
    monkeypatch.setattr(keeper.time, "monotonic", lambda: steady[0])
    clock = keeper._Clock()
    assert clock.read() == (1000.0, True)
    wall[0] += 86400
    assert clock.read() == (87400.0, False)
    wall[0] += keeper.DISTRUST_SECONDS + 1
    steady[0] += keeper.DISTRUST_SECONDS + 1
    assert clock.read()[1]


def test_images_elsewhere_are_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    far = row("1", ("node-2", "disk", "/x/team-a/web-1"))
    trusted = row("2", ("node-1", "disk", "/mnt/shared/web-2"))
    damaged = replace(row("3", world.on("disk", "3")), created=None)
    places = {"ram": str(world.ram), "disk": str(world.disk)}
    assert gather.image_states([far, trusted, damaged], "node-1", [], places) == ()
    (stored,) = gather.image_states([row("4", ("", "object", "s3://b#-/4"))], "node-1", [], places)
    assert set(stored.replicas) == {"object"}


def test_uses_are_kept_by_workload_and_bounded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", SCHEMA)
    uses = Uses(journal, lambda operation: "", structlog.get_logger())

    async def work() -> dict[str, tuple[float, ...]]:
        await uses.add("a/old", 100.0)
        for number in range(MOST + 5):
            await uses.add("a/web", KEPT_SECONDS + 200.0 + number)
        return await uses.all()

    found = asyncio.run(work())
    assert list(found) == ["a/web"]
    assert len(found["a/web"]) == MOST
    assert found["a/web"][-1] == KEPT_SECONDS + 200.0 + MOST + 4

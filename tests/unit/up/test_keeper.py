"""Models that are settled cost one look a second, all together; after a reboot all come back, with room for each."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Refused
from kybernate.up import probing
from kybernate.up.keeper import Keeper
from kybernate.up.lifecycle import Done, Step
from kybernate.up.models_file import ModelsFile, load
from kybernate.up.pods import Running
from kybernate.up.room import Gpu, Holder, Room

SIZE = 15
GPU = "GPU-1"


@dataclass
class Node:
    """Pods, the agent, and a GPU of which others have a part."""

    file: ModelsFile
    others: int = 120
    total: int = 141
    running: dict[str, Running] = field(default_factory=dict)
    awake: set[str] = field(default_factory=set)
    began: list[tuple[str, bool]] = field(default_factory=list)  # models, and whether from templates
    said: list[str] = field(default_factory=list)
    looks: int = 0
    fails: str = ""  # what a restore says
    seats: bool = False
    left: list[str] = field(default_factory=list)  # models that were asked to leave
    ranked: list[tuple[str, int]] = field(
        default_factory=list
    )  # models and their priorities, as the arbiter heard them

    def keeper(self, *models: Holder) -> Keeper:
        async def look() -> list[Gpu]:
            return [Gpu(GPU, 0, self.total, self.others + SIZE * len(self.awake))]

        room = Room(look, lambda: list(models), self.left.append, lambda: self.seats)
        room.changed()  # as a reboot is no quiet time
        return Keeper(self.file, self, self, None, lambda model, text: self.said.append(text), room)  # type: ignore[arg-type]  # fakes

    # -- pods

    def list(self) -> dict[str, Running]:
        self.looks += 1
        return dict(self.running)

    def has_image(self, entry: Any) -> bool:
        return True

    def rotate(self, running: Running) -> None:
        """Its log is short."""

    def prioritize(self, running: Running, priority: int) -> None:
        self.ranked.append((running.model, priority))

    def remove(self, running: Running) -> None:
        del self.running[running.model]

    def start(self, entry: Any, template: str = "") -> None:
        self.began.append((entry.name, bool(template)))
        if template and self.fails:
            raise Refused(f"containerd: {self.fails}: unknown")
        if entry.seat and self.seats:
            self.awake.clear()  # by the arbiter
        if entry.devices:
            free = self.total - self.others - SIZE * len(self.awake)
            if free < SIZE:
                raise Refused(f"containerd: GPU {GPU} has {free} MiB free, {SIZE} MiB are needed: unknown")
            self.awake.add(entry.name)
        self.running[entry.name] = Running(entry.name, entry.digest, "new", "container", running=True, started=2.0)

    # -- the agent

    async def image(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(vram_bytes=SIZE)

    async def container(self, name: str) -> SimpleNamespace:
        await asyncio.sleep(0)
        return SimpleNamespace(gpu=Container.ATTACHED if name.rpartition("/")[2] in self.awake else Container.NO_GPU)

    async def suspend(self, name: str) -> SimpleNamespace:
        async def result() -> SimpleNamespace:
            await asyncio.sleep(0)
            self.awake.discard(name.rpartition("/")[2])
            return SimpleNamespace(vram_bytes=SIZE)

        return SimpleNamespace(result=result)

    async def verify_image(self, name: str, **_: Any) -> SimpleNamespace:
        async def result() -> None:
            """Return: it is whole."""

        return SimpleNamespace(result=result)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    async def healthy(*_: Any) -> bool:
        return True

    monkeypatch.setattr(probing, "until_healthy", healthy)
    return Node(models(tmp_path, 5, "gpus: [0], "))


def models(tmp_path: Path, count: int, more: str = "") -> ModelsFile:
    written = tmp_path / "models.yaml"
    lines = (f"  m{n}: {{image: x, {more}port: {9000 + n}}}\n" for n in range(count))
    written.write_text("models:\n" + "".join(lines))
    return load(written, {})


def test_settled_models_are_looked_at_once_a_turn(tmp_path: Path) -> None:
    node = Node(models(tmp_path, 5))
    for one in node.file.models:
        node.running[one.name] = Running(one.name, one.digest, "pod", "container", running=True, started=1.0)
    keeper = node.keeper()
    for kept in keeper.models.values():
        kept.done = Done(healthy=True, warmed=True, settled=True)
    asyncio.run(keeper.turn())
    assert node.looks == 1
    assert {kept.step for kept in keeper.models.values()} == {Step.NONE}


def test_pods_are_looked_at_again_after_a_step(node: Node) -> None:
    node.running["m0"] = Running("m0", "of another file", "pod", "container", running=True)
    node.running["gone"] = Running("gone", "", "pod")

    async def turn() -> None:
        keeper = node.keeper()
        await keeper.turn()
        await ended(keeper)

    asyncio.run(turn())
    assert node.running["m0"].pod == "new"
    assert "gone" not in node.running


async def ended(keeper: Keeper) -> None:
    """Return when the steps of all models that were begun have ended."""
    await asyncio.gather(*(kept.task for kept in keeper.models.values() if kept.task is not None))


def test_all_come_back_after_a_reboot_and_none_from_zero(node: Node) -> None:
    async def reboot() -> None:
        keeper = node.keeper()
        for _ in range(2):
            await keeper.turn()
            await ended(keeper)
        assert all(kept.done.settled for kept in keeper.models.values()), node.said
        assert not any(kept.done.stale or kept.done.failures for kept in keeper.models.values())

    asyncio.run(reboot())
    assert sorted(node.began) == [(f"m{n}", True) for n in range(5)]  # each once
    assert node.awake == set()  # none was asked


def test_model_whose_template_is_not_there_yet_is_put_on_disk_once_it_is(node: Node) -> None:
    async def parked() -> None:
        keeper = node.keeper()
        parking = asyncio.create_task(keeper.park("m0"))
        keeping = asyncio.create_task(keeper.run())
        async with asyncio.timeout(20):
            await parking
        assert keeper.models["m0"].step is Step.PARKED
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(parked())
    assert ("m0", True) in node.began
    assert "m0" not in node.running


def test_restore_without_room_keeps_its_template(node: Node) -> None:
    node.others = node.total  # which no claim can see to

    async def twice() -> None:
        keeper = node.keeper()
        await keeper.turn()
        await ended(keeper)
        assert not any(kept.done.stale for kept in keeper.models.values())
        assert all(kept.done.failures == 1 and kept.done.short for kept in keeper.models.values())
        node.others = 0
        async with asyncio.timeout(20):
            running = asyncio.create_task(keeper.run())
            async with keeper.brought_up("m0"):  # without its pause
                pass
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(twice())
    assert all(template for _, template in node.began)
    assert node.began.count(("m0", True)) == 2


@pytest.mark.parametrize("fails", ["runc did not restore it", "GPU GPU-1 is a H100, the image needs a H200"])
def test_template_that_does_not_restore_is_given_up(node: Node, fails: str) -> None:
    node.fails = fails

    async def tries() -> None:
        keeper = node.keeper()
        kept = keeper.models["m0"]
        while not kept.done.stale:
            assert kept.done.unexplained < 5
            kept.ended = 0.0  # the pause is over
            await keeper.turn()
            await ended(keeper)

    asyncio.run(tries())
    assert node.began.count(("m0", True)) == 3


def test_one_without_a_request_does_not_send_away_one_that_has_some(node: Node) -> None:
    node.running["m1"] = Running("m1", node.file.models[1].digest, "pod", "container", running=True)
    node.awake.add("m1")
    node.others = 120

    async def turn(holder: Holder) -> Step:
        keeper = node.keeper(holder)
        keeper.models["m1"].done = Done(healthy=True, warmed=True, settled=True)
        await keeper.turn()
        await ended(keeper)
        assert keeper.models["m0"].problem.startswith("waits for room")
        return keeper.models["m0"].step

    assert asyncio.run(turn(Holder("m1", frozenset({GPU}), SIZE, 0.0, busy=True))) is Step.RESTORE
    assert asyncio.run(turn(Holder("m1", frozenset({GPU}), SIZE, 0.0, priority=1))) is Step.RESTORE
    assert node.began == []


def test_restart_is_over_when_the_program_is_another_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the models while its pod is being removed does not take what still runs for what was started."""
    node.running["m0"] = Running("m0", node.file.models[0].digest, "old", "container", running=True)
    removing, goes_on, remove = threading.Event(), threading.Event(), node.remove

    def slow(running: Running) -> None:
        removing.set()
        assert goes_on.wait(20)
        remove(running)

    monkeypatch.setattr(node, "remove", slow)

    async def restarted() -> None:
        keeper = node.keeper()
        kept = keeper.models["m0"]
        kept.done = Done(healthy=True, warmed=True, settled=True)
        restarting = asyncio.create_task(keeper.restart("m0"))
        assert await asyncio.to_thread(removing.wait, 20)
        await keeper.turn()
        if kept.task is not None and kept.task.get_coro().__name__ == "_keep":  # type: ignore[union-attr]
            await kept.task
        goes_on.set()
        keeping = asyncio.create_task(keeper.run())
        async with asyncio.timeout(20):
            await restarting
        assert node.running["m0"].pod == "new"
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(restarted())
    assert node.began.count(("m0", True)) == 1


@pytest.mark.parametrize("seats", [True, False])
def test_model_with_a_seat_waits_for_its_turn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seats: bool
) -> None:
    """Where the agent has seats, its arbiter makes the room while containerd starts the container."""

    async def healthy(*_: Any) -> bool:
        return True

    monkeypatch.setattr(probing, "until_healthy", healthy)
    node = Node(models(tmp_path, 2, "gpus: [0], seat: large, "), seats=seats)
    node.others = node.total - SIZE
    node.awake.add("m1")
    node.running["m1"] = Running("m1", node.file.models[1].digest, "pod", "container", running=True)

    async def turn() -> None:
        keeper = node.keeper(Holder("m1", frozenset({GPU}), SIZE, 0.0, busy=True))
        keeper.models["m1"].done = Done(healthy=True, warmed=True, settled=True)
        await keeper.turn()
        await ended(keeper)

    asyncio.run(turn())
    assert node.began == ([("m0", True)] if seats else [])
    assert node.left == []


def test_changed_priority_of_a_seat_applies_while_its_program_runs(tmp_path: Path) -> None:
    node = Node(models(tmp_path, 2, "gpus: [0], seat: large, "), seats=True)
    node.running = {
        one.name: Running(one.name, one.digest, "pod", f"c-{one.name}", running=True) for one in node.file.models
    }

    async def changed() -> None:
        keeper = node.keeper()
        for kept in keeper.models.values():
            kept.done = Done(healthy=True, warmed=True, settled=True)
        await keeper.turn()
        await keeper.turn()
        assert node.ranked == [("m0", 0), ("m1", 0)]  # once: what a former `kybernate up` said is not known
        first, second = node.file.models
        keeper.change(replace(node.file, models=(first, replace(second, priority=5))))
        await keeper.turn()
        await keeper.turn()

    asyncio.run(changed())
    assert node.ranked[2:] == [("m1", 5)]
    assert node.began == []
    assert {name: one.container for name, one in node.running.items()} == {"m0": "c-m0", "m1": "c-m1"}


def test_program_that_ended_while_it_loaded_has_all_others_leave(node: Node) -> None:
    kept = node.keeper().models["m0"]
    kept.vram, keeper = SIZE, node.keeper()
    assert keeper._needed(kept, Step.START) == SIZE
    kept.done = Done(failures=1)
    assert keeper._needed(kept, Step.START) is None
    assert keeper._needed(kept, Step.RESTORE) == SIZE
    kept.done = Done(short=True)
    assert keeper._needed(kept, Step.RESTORE) is None

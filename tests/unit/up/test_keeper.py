"""Models that are settled cost one look at the pods a second, all of them together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kybernate.up.lifecycle import Done, Step
from kybernate.up.models_file import ModelsFile, load
from kybernate.up.pods import Running
from kybernate.up.program import Keeper


class Pods:
    def __init__(self, file: ModelsFile) -> None:
        self.running = {
            one.name: Running(one.name, one.digest, "pod", "container", running=True, started=1.0)
            for one in file.models
        }
        self.looks = 0

    def list(self) -> dict[str, Running]:
        self.looks += 1
        return dict(self.running)

    def has_image(self, entry: Any) -> bool:
        return True

    def remove(self, running: Running) -> None:
        del self.running[running.model]


class Agent:
    async def image(self, name: str) -> None:
        """Return: there is a template of each."""


def models(tmp_path: Path, count: int) -> ModelsFile:
    written = tmp_path / "models.yaml"
    written.write_text("models:\n" + "".join(f"  m{n}: {{image: x, port: {9000 + n}}}\n" for n in range(count)))
    return load(written, {})


def test_settled_models_are_looked_at_once_a_turn(tmp_path: Path) -> None:
    file = models(tmp_path, 5)
    pods, agent, session = Pods(file), Agent(), None
    keeper = Keeper(file, pods, agent, session, lambda model, text: None)  # type: ignore[arg-type]  # fakes
    for kept in keeper.models.values():
        kept.done = Done(healthy=True, warmed=True, settled=True)
    asyncio.run(keeper.turn())
    assert pods.looks == 1
    assert {kept.step for kept in keeper.models.values()} == {Step.NONE}


def test_pods_are_looked_at_again_after_a_step(tmp_path: Path) -> None:
    file = models(tmp_path, 2)
    pods, said = Pods(file), []
    pods.running["m0"] = Running("m0", "of another file", "pod", "container", running=True)
    pods.running["gone"] = Running("gone", "", "pod")
    keeper = Keeper(file, pods, Agent(), None, lambda model, text: said.append((model, text)))  # type: ignore[arg-type]  # fakes
    for kept in keeper.models.values():
        kept.done = Done(healthy=True, warmed=True, settled=True)

    def started(entry: Any, template: str = "") -> None:
        pods.running[entry.name] = Running(entry.name, entry.digest, "new", "container", running=True, started=2.0)

    pods.start = started  # type: ignore[attr-defined]
    asyncio.run(keeper.turn())
    assert pods.running["m0"].pod == "new"
    assert "gone" not in pods.running
    assert pods.looks == 3  # at first, after the removal, and after the restore

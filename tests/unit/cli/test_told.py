"""The agent knows an image as soon as the command that has brought, moved or changed it ends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kybernate.agent.settings import Settings
from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save


@pytest.fixture
def agent(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    settings = tmp_path / "agent.toml"
    settings.write_text(f'[store]\nurl = "file://{tmp_path}/store"\nkey = "{tmp_path}/store-key/key"\n')
    load: Callable[[Path], Settings] = Settings.load
    monkeypatch.setattr(Settings, "load", lambda: load(settings))
    (tmp_path / "image.key").write_text("11" * 32)
    (tmp_path / "image.key").chmod(0o600)
    with (tmp_path / "shim.toml").open("a") as shim:
        shim.write(f'encryption_key = "{tmp_path}/image.key"\n')
    save(node.checkpoints / "i")
    agent.failure = (grpc.StatusCode.NOT_FOUND, wire.Error(type="Missing", message="there is none"))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def looked_at(agent: FakeAgent) -> list[str]:
    return [one.image for one in agent.requests if isinstance(one, wire.GetImageRequest)]


def test_agent_looks_at_what_each_command_has_brought(node: Node, agent: FakeAgent, tmp_path: Path) -> None:
    below = node.checkpoints
    export = str(tmp_path / "e")
    node.run("export", "i", export)
    save(tmp_path / "foreign", signed=False)
    node.run("store", "init")
    commands: list[tuple[tuple[str, ...], list[Path]]] = [
        (("pull", export, "pulled", "--yes"), [below / "pulled"]),
        (("pull", export, "mine", "--yes", "-n", "shop"), [below / "shop/mine", below / "shop/mine"]),
        (("import", str(tmp_path / "foreign"), "copied", "--yes"), [below / "copied"]),
        (("import", str(tmp_path / "foreign"), "moved", "--yes", "--move"), [below / "moved", tmp_path / "foreign"]),
        (("encrypt", "pulled"), [below / "pulled"]),
        (("decrypt", "pulled"), [below / "pulled"]),
        (("store", "put", "i"), []),
        (("store", "get", "i", str(below / "back")), [below / "back"]),
    ]
    for argv, places in commands:
        agent.requests.clear()
        done = node.run(*argv)
        assert "does not know" not in done.stderr
        assert set(map(str, places)) <= set(looked_at(agent)), argv


def test_agent_that_refuses_is_a_warning(node: Node, agent: FakeAgent, tmp_path: Path) -> None:
    node.run("export", "i", str(tmp_path / "e"))
    agent.failure = (grpc.StatusCode.UNAVAILABLE, wire.Error(type="Unavailable", message="no database"))
    done = node.run("pull", str(tmp_path / "e"), "pulled", "--yes")
    assert "kybernate: the agent does not know the image yet: no database" in done.stderr
    assert (node.checkpoints / "pulled").is_dir()

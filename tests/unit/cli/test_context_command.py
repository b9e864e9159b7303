"""`kybernate context`, and `--agent`, which chooses an agent for one command."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.cli import ordered, prompt_call
from kybernate.cli.agents import is_remote
from kybernate.client import contexts
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(contexts, "SYSTEM", tmp_path / "none")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("KYBERNATE_AGENT", "")  # restored afterwards, whatever a command sets
    (tmp_path / "kybernate").mkdir()
    return tmp_path / "kybernate" / "client.toml"


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def write(home: Path, agent: FakeAgent | None = None) -> None:
    socket = agent.socket if agent else "/none.sock"
    home.write_text(
        'ca = "c"\ncertificate = "c"\nkey = "k"\n[contexts.far]\naddress = "n:1"\n'
        f'[contexts.near]\naddress = "{socket}"\n'
    )


def test_contexts_are_listed_chosen_and_shown(node: Node, home: Path) -> None:
    assert node.json("context", "ls") == []
    assert "agent of this node" in node.run("context", "show").stdout
    write(home)
    assert node.run("context", "ls", "-o", "name").stdout.split() == ["far", "near"]
    assert "far is the current context" in node.run("context", "use", "far").stdout
    rows = [line.split() for line in node.run("context", "ls").stdout.splitlines()]
    assert rows[1:] == [["*", "far", "n:1", str(home)], ["near", "/none.sock", str(home)]]
    assert node.json("context", "show")["name"] == "far"
    assert node.json("context", "show", "near")["ca"] == str(home.parent / "c")
    node.run("context", "use", "z", status=3)


@pytest.mark.parametrize("words", [("ops", "--agent", "near"), ("--agent", "near", "ops"), ("--agent=near", "ops")])
def test_option_chooses_for_one_command(node: Node, home: Path, agent: FakeAgent, words: tuple[str, ...]) -> None:
    write(home, agent)
    node.run(*words)
    assert agent.requests


def test_current_context_is_used_and_the_environment_has_precedence(
    node: Node, home: Path, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, agent)
    node.run("context", "use", "near")
    node.run("ops")
    count = len(agent.requests)
    assert count
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    node.run("ops", status=6)
    monkeypatch.setenv("KYBERNATE_AGENT", "local")
    node.run("ps")
    assert len(agent.requests) == count


def test_what_is_of_this_node_alone_is_refused(node: Node, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home)
    for words in (("release", "c"), ("restore", "i"), ("restore", "i", "-d", "--url", "file:///s")):
        assert "is the agent of another node" in node.run(*words, "--agent", "far", status=4).stderr
    assert "No such option: --agent" in node.run("doctor", "--agent", "far", status=2).stderr
    monkeypatch.setenv("KYBERNATE_AGENT", "far")
    assert is_remote()


def test_unknown_context_is_not_found(node: Node) -> None:
    assert "no context has the name 'z'" in node.run("ps", "--agent", "z", status=3).stderr


def test_words_are_ordered() -> None:
    assert ordered(["--agent", "a", "ps", "-w"]) == ["ps", "--agent=a", "-w"]
    assert ordered(["--agent=a", "ps"]) == ["ps", "--agent=a"]
    for words in (["ps", "--agent", "a"], ["--agent", "a"], ["--agent", "a", "--help"], ["--agent=a"], []):
        assert ordered(words) == words


def test_prompt_command_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_call(["ps", "--agent", "near"]) is not None
    assert os.environ["KYBERNATE_AGENT"] == "near"

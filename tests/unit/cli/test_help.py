"""Help and completion: grouped, whole at 80 columns, in words; and names without a wait."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kybernate.cli import completed_words, completion
from kybernate.cli.application import application
from kybernate.cli.commands import BY_AGENT, COMMANDS, GROUPS
from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent

TYPES = re.compile(r"\b(TEXT|INTEGER|FLOAT|BOOLEAN|FILENAME|UUID|StrEnum)\b|<[^>]+>|\b[A-Z][a-z]+\.[A-Z]+\b")
SHELLS = ("bash", "zsh", "fish")


def pages() -> list[tuple[str, ...]]:
    """Return the words of every command that has a help."""
    program: Any = typer.main.get_command(application())
    found: list[tuple[str, ...]] = [()]
    for name, one in program.commands.items():
        found.append((name,))
        found += [(name, inner) for inner in getattr(one, "commands", {})]
    return found


PAGES = pages()


def shown(words: tuple[str, ...]) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(application(words), [*words, "--help"])
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_is_whole_at_80_columns_and_names_no_types(words: tuple[str, ...]) -> None:
    text = shown(words)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert [line for line in text.splitlines() if line.endswith("...") and "Usage:" not in line] == []
    assert "[[" not in text
    assert TYPES.search(text) is None, text


def test_commands_are_in_groups() -> None:
    titles = [line[:-1] for line in shown(()).splitlines() if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert titles == ["Options", *GROUPS]
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= set(COMMANDS)
    assert set(COMMANDS) >= BY_AGENT


def test_wait_means_one_thing() -> None:
    program: Any = typer.main.get_command(application())
    options = {
        name: one for name, command in program.commands.items() for one in command.params if "--wait" in one.opts
    }
    assert {one.help for one in options.values()} == {options["suspend"].help}
    assert all("--no-wait" in one.secondary_opts for one in options.values())


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def test_names_that_the_agent_knows_are_completed(agent: FakeAgent) -> None:
    agent.containers = [
        wire.Container(id="c1", title="team/web/main"), wire.Container(id="c2", title="x", sandbox=True),
    ]  # fmt: skip
    agent.images = [wire.Image(id="f00", name="one", source=wire.Source(namespace="team"))]
    agent.push(wire.Operation(id="op-1", state=wire.SUCCEEDED))
    agent.push(wire.Operation(id="op-2", state=wire.RUNNING))
    assert completion.a_container("") == ["team/web/main", "c1"]
    assert completion.a_container("te") == ["team/web/main"]
    assert completion.an_image("") == ["team/one", "one", "f00"]
    assert completion.an_operation("op") == ["op-2", "op-1"]
    assert completion.a_running_operation("") == ["op-2"]


def test_completion_without_an_agent_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "/none.sock")
    assert (completion.a_container(""), completion.an_image("")) == ([], [])
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    assert completion.an_operation("") == []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert completion.a_context("") == ["local"]
    assert completion.a_tier("") == ["ram", "disk", "object"]


def completed(shell: str, text: str, *, program: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "_KYBERNATE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": text, "COMP_WORDS": text,
        "COMP_CWORD": str(len(text.split(" ")) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "KYBERNATE_AGENT": "none",
    }  # fmt: skip
    code = f"import sys; sys.argv = ['kybernate']; from kybernate.cli import main\n{program or 'main()'}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_tiers(shell: str) -> None:
    names = completed(shell, "kybernate pro")
    assert "promote" in names.stdout
    assert "suspend" not in names.stdout
    assert "object" in completed(shell, "kybernate evict x --from ").stdout
    nothing = completed(shell, "kybernate suspend ")
    assert nothing.stderr == ""


def test_completion_loads_little() -> None:
    program = "try:\n main()\nfinally:\n print(*sys.modules, file=sys.stderr)"
    for text in ("kybernate re", "kybernate suspend "):
        loaded = set(completed("bash", text, program=program).stderr.split())
        assert loaded.isdisjoint({"rich", "kybernate.agent", "kybernate.store", "sqlalchemy", "obstore", "textual"})


def test_words_to_complete_are_those_of_either_form() -> None:
    assert completed_words({"COMP_WORDS": "kybernate ps -"}) == ["ps", "-"]
    assert completed_words({"_TYPER_COMPLETE_ARGS": "kybernate ops", "COMP_WORDS": "x"}) == ["ops"]
    assert completed_words({}) == []

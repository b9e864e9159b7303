"""A command line loads the module of its command, and every other command is found all the same."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer

from kybernate.cli import COMMANDS, application


def commands(*words: str) -> list[str]:
    group: Any = typer.main.get_command(application(words))
    return list(group.commands)


def test_table_has_every_command() -> None:
    assert set(commands()) == set(COMMANDS)


@pytest.mark.parametrize("words", [(), ("--help",), ("nonsense", "ps")], ids=str)
def test_all_commands_are_there_where_none_is_named(words: tuple[str, ...]) -> None:
    assert commands(*words) == commands()


@pytest.mark.parametrize("command", COMMANDS)
def test_named_command_is_in_its_module(command: str) -> None:
    assert commands(command) == [name for name in commands() if COMMANDS[name] == COMMANDS[command]]


def test_command_loads_no_other_module() -> None:
    program = "import sys; from kybernate.cli import application; application(['ps']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    others = {f"kybernate.cli.{module}" for module in COMMANDS.values()} - {"kybernate.cli.status"}
    assert others.isdisjoint(loaded)
    assert "rich" not in loaded

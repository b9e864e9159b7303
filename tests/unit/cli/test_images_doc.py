"""docs/images.md says what the code does: its commands exist with these options, its states are those of the list."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from kybernate.node.images import State
from tests.unit.cli.conftest import Node

DOC = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.startswith("kybernate ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_has_these_arguments(node: Node, command: str) -> None:
    """An unknown option or a superfluous argument is an error of usage, which comes before anything is done."""
    argv = shlex.split(command)[1:]
    node.containerd.close()
    result = node.attempt(*argv)
    assert result.exit_code != 2, result.output
    assert "Usage" not in result.output
    node.run(*(argv[:2] if argv[0] == "keys" else argv[:1]), "--help")


def test_every_command_about_images_is_documented() -> None:
    assert {" ".join(command.split()[1:2]) for command in COMMANDS} == {
        "checkpoint",
        "images",
        "inspect",
        "keys",
        "import",
    }
    assert {command.split()[2] for command in COMMANDS if " keys " in command} == {"list", "path", "rotate", "revoke"}


def test_states_are_those_of_the_list() -> None:
    table = DOC.partition("| state |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z ]+)`", table, re.MULTILINE) == sorted(get_args(State), key=table.index)

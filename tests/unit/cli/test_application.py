"""A command line loads the module of its command, and every other command is found all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kybernate.cli.application import application
from kybernate.cli.commands import COMMANDS
from kybernate.cli.exit_codes import ExitCode


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
    program = "import sys; from kybernate.cli.application import application; application(['ps']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    others = {f"kybernate.cli.{module}" for module in COMMANDS.values()} - {"kybernate.cli.status"}
    assert others.isdisjoint(loaded)
    assert "rich" not in loaded


# -- commands that are called promptly -------------------------------------------------------------------------------

# What a command may not have loaded when it makes its first call, to agent or containerd: what takes long. gRPC, by
# which it is made, needs asyncio and protobuf.
HEAVY = {
    "typer", "click", "pydantic", "rich", "yaml", "ssl", "sqlalchemy", "obstore", "cryptography", "psutil", "httpx",
    "kybernate.agent", "kybernate.registry", "kybernate.store", "kybernate_shim.config", "kybernate_shim.checkpoint",
}  # fmt: skip
BY_AGENT = {"KYBERNATE_AGENT": "/none"}, {"kybernate.node.containerd", "kybernate_shim.ttrpc"}
BY_CONTAINERD = {"KYBERNATE_AGENT": "none"}, {"kybernate.client", "kybernate_shim.ttrpc"}
FIRST_CALL = """
import builtins, sys

def reached(*arguments, **options):
    print(*sys.modules)
    sys.exit(7)

def import_and_hook(*arguments):
    found = import_(*arguments)
    if hasattr(grpc := sys.modules.get("grpc"), "insecure_channel"):
        grpc.insecure_channel = reached
    return found

import_, builtins.__import__ = builtins.__import__, import_and_hook
sys.argv = ["kybernate", *sys.argv[1:]]
from kybernate.cli import main
main()
"""


@pytest.mark.parametrize("way", [BY_AGENT, BY_CONTAINERD], ids=["agent", "containerd"])
@pytest.mark.parametrize("words", [("ps",), ("status",), ("suspend", "c1"), ("resume", "c1", "--json")], ids=" ".join)
def test_prompt_command_makes_its_first_call_with_little_loaded(
    words: tuple[str, ...], way: tuple[dict[str, str], set[str]]
) -> None:
    environment, others = way
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, *words], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    loaded = set(done.stdout.split())
    assert "grpc" in loaded
    assert loaded.isdisjoint(HEAVY | others), sorted(loaded & (HEAVY | others))


def test_prompt_commands_are_read_without_grpc() -> None:
    program = (
        "import sys; from kybernate.cli import prompt_call;"
        "assert prompt_call(['suspend', 'c1']); assert not prompt_call(['suspend']);"
        "assert not prompt_call(['images']);"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"grpc", "google.protobuf", "asyncio"}.isdisjoint(loaded)


def test_prompt_command_explains_its_failure(tmp_path: Path) -> None:
    program = "import sys; sys.argv = ['kybernate', 'ps', '-a', sys.argv[1]]; from kybernate.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stderr.startswith("kybernate: ")
    assert "advice: is containerd running?" in done.stderr
    assert "Traceback" not in done.stderr


def test_prompt_command_whose_output_is_not_wanted_any_more_ends_quietly() -> None:
    program = (
        "import os, sys; from kybernate import cli; from kybernate.cli.output import echo;"
        "reading, writing = os.pipe(); os.dup2(writing, 1); os.close(writing); os.close(reading);"
        "sys.exit(cli._status(lambda: echo('text')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")

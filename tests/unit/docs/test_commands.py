"""Every command in a block of the documentation is one that exists, with these options and arguments.

`kybernate …` lines go through the command line's own parser. A command, or a language of a block, that is not known
here fails: it gets a check, or a test that executes it.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from kybernate.agent.settings import Settings
from kybernate.cli.application import application
from kybernate.proxy import settings as proxy_settings
from kybernate.seats.configuration import read_yaml
from kybernate.up import models_file
from kybernate_shim.config import Config
from tests.documentation import ROOT, Block, block, blocks
from tests.fakes.documented import CRICTL, CTR, accepted
from tests.lab.cli import parse as parse_lab

BLOCKS = tuple(blocks())
TARGETS = {
    word for line in re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in line.split()
}
VARIABLES = {"HF_TOKEN": "secret"}  # of the shell that reads models.yaml
SHELL = {  # of the system, without a parser that a test could ask
    "apt-get", "cat", "cp", "curl", "echo", "env", "grep", "install", "ln", "mkdir", "mount", "mv", "openssl", "printf",
    "rsync", "sed", "sha256sum", "ssh", "systemctl", "systemd-sysusers", "umask",
}  # fmt: skip


def parse(words: list[str]) -> None:
    """Parse a command line of `kybernate` without executing it; typer's errors have a `format_message`."""
    command: Any = typer.main.get_command(application())
    context: Any = None
    while True:
        context = command.make_context(words[0], words[1:], parent=context)
        rest = [*context._protected_args, *context.args] if isinstance(command, TyperGroup) else []
        if not isinstance(command, TyperGroup) or (command.invoke_without_command and not rest):
            return
        name, command, rest = command.resolve_command(context, rest)
        words = [name or "", *rest]


def kybernate(words: list[str]) -> None:
    try:
        parse(words)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        pytest.fail(f"{shlex.join(words)}: {error.format_message()}")


def make(words: list[str]) -> None:
    assert {word for word in words[1:] if "=" not in word} <= TARGETS


def lab(words: list[str]) -> None:
    assert parse_lab(words[1:]).command
    assert "--" in words
    paths = [word for word in words if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths)


def kubectl(words: list[str]) -> None:
    """A file of ours that it applies is there; whatever else it does, a test of the cluster runs (see below)."""
    if words[1:3] == ["apply", "-f"]:
        assert all(yaml.safe_load_all((ROOT / path).read_text()) for path in words[3:])


def containerd(words: list[str]) -> None:
    assert words[1:] in (["config", "migrate"], ["config", "dump"])


def environment(words: list[str]) -> None:
    """An interpreter, or a program of a virtual environment, that the installation names."""
    assert words[0] in ("python3", "/opt/kybernate/bin/pip", "/opt/kybernate/bin/python")


CHECKS: Mapping[str, Callable[[list[str]], None]] = {
    "kybernate": kybernate,
    "make": make,
    "tests/lab/run": lab,
    "kubectl": kubectl,
    "containerd": containerd,
    "ctr": lambda words: accepted(CTR, words),
    "crictl": lambda words: accepted(CRICTL, words),
    "python3": environment,
    "/opt/kybernate/bin/pip": environment,
    "/opt/kybernate/bin/python": environment,
    **dict.fromkeys(SHELL, lambda words: None),
}
COMMANDS = [(one, line) for one in BLOCKS if one.language == "sh" for line in one.commands]


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the programs with their arguments that a line of shell consists of, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    argv: list[str] = []
    words = iter(lexer)
    for word in words:
        if word in (">", ">>"):
            next(words)
        elif word in ("&&", "||", "|", ";", "(", ")"):
            if argv:
                yield argv
            argv = []
        else:
            argv.append(word)
    if argv:
        yield argv


@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=[f"{one.page}: {line[:60]}" for one, line in COMMANDS])
def test_command_of_the_documentation_exists(where: Block, line: str) -> None:
    for argv in simple_commands(line):
        assert argv[0] in CHECKS, f"{where.page}: no test knows {argv[0]}"
        CHECKS[argv[0]](argv)
        if argv[0] == "kubectl" and argv[1:3] != ["apply", "-f"]:
            assert where.run_by.startswith("tests/cluster/"), f"{where.page}: kubectl's commands are run by a test"


@pytest.mark.parametrize("one", BLOCKS, ids=[f"{one.page}-{number}" for number, one in enumerate(BLOCKS)])
def test_block_is_in_a_language_that_is_checked(one: Block, tmp_path: Path) -> None:
    assert one.language in ("sh", "toml", "yaml", "mermaid", "python", "text"), f"{one.page}: {one.text}"
    if any(line.startswith("kubectl ") and " -f " not in line for line in one.commands):
        assert one.run_by, f"{one.page}: what kubectl is asked is run by a test\n{one.text}"
    if one.language == "python":
        assert one.run_by, f"{one.page}: a program is run by a test\n{one.text}"
    if one.language == "toml":
        file = tmp_path / "a.toml"  # the shim's or the agent's
        file.write_text(one.text)
        if one.name == "contexts":
            return  # of client.toml, read by the test that it names
        assert () in (Config.load(file).warnings, Settings.load(file).warnings)
        assert tomllib.loads(one.text)
    elif one.language == "yaml":
        (document,) = yaml.safe_load_all(one.text)
        if one.page == "docs/up.md":
            assert models_file.parse(one.text, str(tmp_path / "models.yaml"), VARIABLES).models
            return
        if "models" in document:
            assert proxy_settings.parse(one.text).models
            return
        if "profiles" in document:
            assert read_yaml(one.text, one.page).profiles
            return
        pod = document["spec"].get("template", document)["spec"]
        assert pod["runtimeClassName"] == "kybernate"
    if one.language == "text":  # what a program prints: its headings
        headings = [line.removeprefix("── ") for line in one.text.splitlines() if line.startswith("── ")]
        program = (ROOT / one.run_by).read_text()
        assert headings
        assert [line for line in headings if line not in program] == []
        return
    if one.run_by:
        assert f'block("{one.page}", "{one.name}")' in (ROOT / one.run_by).read_text()


@pytest.mark.parametrize("line", ["kybernate nothing", "kybernate ps --nothing", "kybernate restore", "kybernate keys"])
def test_wrong_command_would_be_found(line: str) -> None:
    with pytest.raises(Exception, match=r".") as failed:
        parse(shlex.split(line))
    assert hasattr(failed.value, "format_message")


def test_every_command_of_ours_is_documented() -> None:
    command: Any = typer.main.get_command(application())
    assert command.commands
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in command.commands if not re.search(rf"\bkybernate {name}\b", text)] == []


def test_steps_of_the_readme_are_those_of_the_manual() -> None:
    command = block("docs/installation.md", "setup").commands[-1]
    assert command in block("README.md", "install").commands

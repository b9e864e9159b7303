"""A command line that is read without typer means what it means with it."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kybernate.cli.application import application
from kybernate.cli.commands import COMMANDS, PROMPT
from kybernate.cli.declared import NotUnderstood, parsed


def function_of(name: str) -> Any:
    return getattr(import_module(f"kybernate.cli.{COMMANDS[name]}"), name)


@functools.cache
def with_typer(name: str, words: tuple[str, ...], environment: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """Return the arguments by which typer calls the command. Raises NotUnderstood where it does not call it."""
    app, seen = application([name]), []
    for command in app.registered_commands:
        command.callback = functools.wraps(command.callback)(lambda **given: seen.append(given))  # type: ignore[arg-type]
    CliRunner().invoke(app, [name, *words], env=dict(environment))
    if not seen:
        raise NotUnderstood
    return dict(seen[0])


def without_typer(name: str, words: tuple[str, ...]) -> dict[str, Any]:
    function = function_of(name)
    defaults = {key: one.default for key, one in inspect.signature(function).parameters.items()}
    return {**defaults, **parsed(function, words)}


UNDERSTOOD = [
    ("ps", ()),
    ("ps", ("-n", "k8s.io", "-o", "wide")),
    ("ps", ("--output=json", "--namespace=k8s.io")),
    ("ps", ("-w", "--json", "-a", "/run/c.sock")),
    ("status", ()),
    ("status", ("team/web-0",)),
    ("status", ("a=b", "--json")),
    ("suspend", ("c1",)),
    ("suspend", ("--no-wait", "c1", "--timeout", "3.5")),
    ("suspend", ("c1", "--wait", "--timeout=0")),
    ("resume", ("c1", "--json", "-n", "default")),
]
LEFT_TO_TYPER = [
    ("ps", ("--help",)), ("ps", ("-h",)), ("ps", ("extra",)), ("ps", ("--none",)), ("ps", ("-o",)), ("ps", ("-n=x",)),
    ("ps", ("-o", "nothing")), ("ps", ("--json=1",)), ("ps", ("-wh",)), ("ps", ("-nk8s.io",)),
    ("ps", ("--outp", "json")),
    ("ps", ("--", "x")), ("ps", ("-n", "a", "-n", "b")), ("ps", ("-n", "-w")), ("suspend", ()),
    ("suspend", ("c1", "c2")), ("suspend", ("c1", "--timeout", "-1")), ("suspend", ("c1", "--timeout", "soon")),
    ("suspend", ("c1", "--timeout", "nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), UNDERSTOOD, ids=str)
def test_plain_words_are_understood_as_by_typer(name: str, words: tuple[str, ...]) -> None:
    assert without_typer(name, words) == with_typer(name, words)


@pytest.mark.parametrize(("name", "words"), LEFT_TO_TYPER, ids=str)
def test_anything_else_is_left_to_typer(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(NotUnderstood):
        parsed(function_of(name), words)


@pytest.mark.parametrize("value", ["", "/run/other.sock"])
def test_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CONTAINERD_ADDRESS", value)
    assert without_typer("ps", ()) == with_typer("ps", (), (("CONTAINERD_ADDRESS", value),))
    assert without_typer("ps", ("-a", "/x"))["address"] == "/x"


WORDS = st.sampled_from([
    "-n", "--namespace", "--namespace=a", "-o", "json", "--output", "--output=yaml", "--json", "-w", "--watch", "-a",
    "--address=/x", "--timeout", "2", "--timeout=-2", "--wait", "--no-wait", "c1", "", "-", "--", "-h", "a=b",
    "--json=x",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PROMPT), st.lists(WORDS, max_size=5).map(tuple))
def test_what_is_understood_is_what_typer_understands(name: str, words: tuple[str, ...]) -> None:
    try:
        found = without_typer(name, words)
    except NotUnderstood:
        return
    assert found == with_typer(name, words)

"""The command line in every spelling that Go's flag package takes."""

from __future__ import annotations

import pytest

from kybernate_shim.errors import Invalid
from kybernate_shim.invocation import Invocation, parse


def test_start_as_containerd_spells_it() -> None:
    argv = ["-namespace", "k8s.io", "-address", "/run/c.sock", "-publish-binary", "/usr/bin/containerd", "-id", "abc"]
    argv += ["-debug", "start"]
    assert parse(argv) == Invocation(
        action="start", namespace="k8s.io", address="/run/c.sock", publish_binary="/usr/bin/containerd", id="abc",
        debug=True,
    )  # fmt: skip


@pytest.mark.parametrize("spelling", [["-id", "x"], ["-id=x"], ["--id", "x"], ["--id=x"]])
def test_flag_in_all_of_gos_spellings(spelling: list[str]) -> None:
    assert parse([*spelling, "delete"]) == Invocation(action="delete", id="x")


@pytest.mark.parametrize(("word", "value"), [("-debug", True), ("-debug=true", True), ("-debug=false", False)])
def test_switch_takes_an_optional_value(word: str, value: bool) -> None:
    assert parse([word]).debug is value


def test_value_may_hold_an_equals_sign_or_start_with_a_dash() -> None:
    assert parse(["-id=a=b", "-bundle", "-odd"]) == Invocation(id="a=b", bundle="-odd")


def test_unknown_flag_is_skipped() -> None:
    assert parse(["-shiny=new", "-v"]) == Invocation(v=True)


def test_flag_without_its_value_is_named() -> None:
    with pytest.raises(Invalid, match="-namespace needs a value"):
        parse(["-namespace"])


def test_unknown_action_is_named() -> None:
    with pytest.raises(Invalid, match="stop"):
        parse(["stop"])

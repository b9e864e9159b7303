"""Where output goes: the strings of Create and Exec."""

from __future__ import annotations

import os
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.errors import Invalid
from kybernate_shim.task.destination import Destination, parse, plan_outputs

FIFO = "/run/containerd/fifo/1/app-stdout"
# Every name that a file can have, with bytes that are not UTF-8 as Python carries them
names = st.binary(max_size=40).filter(lambda name: b"\0" not in name).map(os.fsdecode)
words = names.filter(bool)


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("", None),
        (FIFO, Destination("path", FIFO)),
        ("/a%20b?c=d#e", Destination("path", "/a%20b?c=d#e")),
        ("fifo:///run/x", Destination("path", "/run/x")),
        ("file:///var/log/a%20b", Destination("file", "/var/log/a b")),
        ("FILE:/var/log/a", Destination("file", "/var/log/a")),
        ("binary:///bin/log", Destination("binary", "/bin/log")),
        ("binary:///bin/log?b=2&a=1&b=3", Destination("binary", "/bin/log", ("b", "2", "a", "1"))),
        (
            "binary:///bin/log?debug&x=&y=1+2%2B3#z",
            Destination("binary", "/bin/log", ("debug", "", "x", "", "y", "1 2+3")),
        ),
    ],
)
def test_text_names_its_destination(text: str, destination: Destination | None) -> None:
    assert parse(text) == destination


@pytest.mark.parametrize("text", ["streaming+unix:///x", "ttrpc:///x", "binary-v2:///x", "http://a/b"])
def test_other_schemes_are_refused_by_name(text: str) -> None:
    with pytest.raises(Invalid, match="is not one of fifo, file, binary"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["relative", "file://relative/log", "file:log", "binary:", "file:///a%00b", "/a\0b", "://"]
)
def test_what_is_no_absolute_path_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"path|NUL"):
        parse(text)


@given(names)
def test_path_is_taken_as_it_stands(name: str) -> None:
    assert parse("/" + name) == Destination("path", "/" + name)


@given(names, st.dictionaries(words, names, max_size=4))
def test_quoted_uri_is_decoded_to_what_was_quoted(name: str, pairs: dict[str, str]) -> None:
    def plus(word: str) -> str:
        return quote_plus(os.fsencode(word))

    query = "&".join(f"{plus(key)}={plus(value)}" for key, value in pairs.items())
    path = quote(os.fsencode("/" + name))
    expected = tuple(word for pair in pairs.items() for word in pair)
    assert parse(f"binary://{path}?{query}") == Destination("binary", "/" + name, expected)


@given(st.text())
def test_any_text_gives_an_absolute_path_or_a_named_error(text: str) -> None:
    try:
        destination = parse(text)
    except Invalid:
        return
    assert destination is None or (destination.path.startswith("/") and "\0" not in destination.path)


@pytest.mark.parametrize(
    ("stdout", "stderr", "terminal", "plan"),
    [
        ("", "", False, {}),
        ("/o", "/e", False, {1: "/o", 2: "/e"}),
        ("/o", "", False, {1: "/o"}),
        ("", "/e", False, {2: "/e"}),
        ("/o", "/e", True, {1: "/o"}),
        ("file:///log", "", False, {1: "/log", 2: "/log"}),
        ("file:///log", "/e", False, {1: "/log", 2: "/log"}),
        ("binary:///log", "", False, {1: "/log", 2: "/log"}),
        ("binary:///log", "binary:///log", True, {1: "/log"}),
    ],
)
def test_stdout_decides_where_stderr_goes(stdout: str, stderr: str, terminal: bool, plan: dict[int, str]) -> None:
    planned = plan_outputs(stdout, stderr, terminal=terminal)
    assert {number: destination.path for number, destination in planned.items()} == plan


def test_logger_for_stderr_alone_is_refused() -> None:
    with pytest.raises(Invalid, match="named by stdout"):
        plan_outputs("/o", "binary:///log", terminal=False)

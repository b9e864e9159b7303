"""The field `model` is found in any body, however it is cut into pieces, with little memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kybernate.proxy.model_field import MOST_TEXT, FormFields, JsonFields, fields_of

WANTED = frozenset({"model", "stream"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(["model", "stream", "messages", 'quo"te', "mod", "\\"]), VALUES, max_size=6)


def fed(content: bytes, size: int) -> dict[str, str | bool]:
    scanner = JsonFields(WANTED)
    for at in range(0, len(content), size):
        scanner.feed(content[at : at + size])
    return scanner.found


@given(OBJECTS, st.integers(1, 40), st.booleans())
@example({"messages": [{"model": "inner"}], "model": "outer"}, 1, True)
@example({"a": {"model": "inner"}, "model": 'q"\\é\U0001f600', "stream": True}, 3, True)
def test_fields_are_those_that_json_has(value: dict[str, object], size: int, ascii: bool) -> None:
    content = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    expected = {name: one for name, one in value.items() if name in WANTED and isinstance(one, str | bool)}
    assert fed(content, size) == expected


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_searched_without_a_failure(content: bytes, size: int) -> None:
    fed(content, size)
    form = FormFields(b"x", WANTED)
    for at in range(0, len(content), size):
        form.feed(content[at : at + size])


def test_search_ends_with_the_last_field() -> None:
    scanner = JsonFields(frozenset({"model"}))
    scanner.feed(b'{"model": "a", "messages": [')
    assert (scanner.done, scanner.found) == (True, {"model": "a"})


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"<html>", b"{}", b'{"model": ["a"]}', b'{"model": {"a": "b"}}'])
def test_body_without_the_field_has_none(content: bytes) -> None:
    scanner = JsonFields(frozenset({"model"}))
    scanner.feed(content)
    assert scanner.found == {}


def test_name_that_is_too_long_is_none() -> None:
    assert "model" not in fed(json.dumps({"model": "m" * (MOST_TEXT + 1)}).encode(), 1 << 20)


def test_first_of_two_counts() -> None:
    assert fed(b'{"model": "a", "model": "b"}', 100) == {"model": "a"}


def test_deep_nesting_and_long_texts_take_no_memory() -> None:
    scanner = JsonFields(frozenset({"model"}))
    scanner.feed(b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000)
    scanner.feed(b', "b": "' + b"x" * 1_000_000 + b'", "model": "m"}')
    assert scanner.found == {"model": "m"}


FORM = (
    b'preamble\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    + bytes(range(256)) * 40
    + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nqwen\r\n--B\r\n'
    b"content-disposition: form-data; name=stream\r\n\r\ntrue\r\n--B--\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_form_has_its_fields_wherever_it_is_cut(size: int) -> None:
    scanner = fields_of('multipart/form-data; boundary="B"', WANTED)
    assert scanner is not None
    for at in range(0, len(FORM), size):
        scanner.feed(FORM[at : at + size])
    assert scanner.found == {"model": "qwen", "stream": True}
    assert scanner.done


def test_type_decides_how_fields_are_found() -> None:
    assert isinstance(fields_of("application/json; charset=utf-8", WANTED), JsonFields)
    assert isinstance(fields_of("", WANTED), JsonFields)
    assert fields_of("application/octet-stream", WANTED) is None
    assert fields_of("multipart/form-data", WANTED) is None

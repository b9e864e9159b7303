"""A manifest of anybody's making: it is read within limits of time and memory, or refused with its reason."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kybernate_shim.bounded_json import MOST_VALUES
from kybernate_shim.checkpoint.image.codec import LONGEST_TEXT
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, File, ManifestInvalid, decode, encode, is_flat
from kybernate_shim.vram_io.image_files import ArenaBlock, ArenaFile, ArenaHole, VramFile
from tests.unit.checkpoint.image.test_manifest import SMALL, document, refusal

MEMORY = 300 << 20  # bytes at most for the worst document that is read at all
FILES = (File("a", 8, "d"), File("b", 8, "d"))


def refused(content: bytes) -> str:
    with pytest.raises(ManifestInvalid) as caught:
        decode(content)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"id": NaN}', "NaN is not JSON"),
        (b'{"id": -Infinity}', "-Infinity is not JSON"),
        (b'{"id": "a", "id": "b"}', "a key occurs twice"),
        (b"1" * 5000, "not JSON"),
        (b'{"version": ' + b"9" * 4000 + b"}", "a huge number is not supported"),
        (b"[" + b"0," * MOST_VALUES + b"0]", "more than 524288 values"),
        (b"[" + b"{}," * MOST_VALUES + b"{}]", "more than 524288 values"),
        (b" " * (MOST_BYTES + 1), "at most 33554432 are accepted"),
    ],
)
def test_document_beyond_the_limits_is_refused(text: bytes, reason: str) -> None:
    assert reason in refused(text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"processes": [{"pid": 1 << 64, "name": "", "rss_bytes": 0}]}, "processes[0].pid: expected at most"),
        ({"processes": [{"pid": 10**4000, "name": "", "rss_bytes": 0}]}, "found a number of 13288 bits"),
        ({"id": "x" * (LONGEST_TEXT + 1)}, "id: 16385 characters"),
        ({"id": "\ud800"}, "id: a text that is not Unicode"),
        ({"mounts": [{}] * 65_537}, "mounts: 65537 items, at most 65536 are accepted"),
        ({"files": [{"name": "x" * 256, "size": 1, "digest": ""}]}, "is not the name of a file"),
        ({"files": [{"name": "a\nb", "size": 1, "digest": ""}]}, "is not the name of a file"),
        ({"steps": [{"name": "", "seconds": 1 << 70}]}, "steps[0].seconds"),
        ({"x" * 10_000: 1}, "unknown field"),
    ],
)
def test_value_beyond_the_limits_is_refused_under_its_name(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(json.dumps(document(**changes)).encode())


def test_infinite_number_is_refused() -> None:
    text = json.dumps(document(steps=[{"name": "", "seconds": 0.5}])).replace("0.5", "1e999")
    assert "steps[0].seconds: expected a finite number" in refused(text.encode())


def vram(**changes: Any) -> VramFile:
    return replace(VramFile(1, "a", 0x1000, 8, 8, "d"), **changes)


def arena(**changes: Any) -> ArenaFile:
    return replace(ArenaFile(1, "b", 8, 8, "d", (ArenaBlock(0, 0, 4), ArenaBlock(1, 4, 4))), **changes)


@pytest.mark.parametrize(
    ("regions", "blocks", "reason"),
    [
        ([vram(file="c")], [], "vram[0].file: 'c' is not among the files"),
        ([vram(size=9)], [], "vram[0]: size or digest differ"),
        ([vram(digest="e")], [], "vram[0]: size or digest differ"),
        ([vram(data_bytes=9)], [], "vram[0].data_bytes: 9 of 8 bytes"),
        ([vram(start=(1 << 64) - 4)], [], "vram[0]: 8 bytes at 0xfffffffffffffffc reach beyond"),
        ([vram(), vram(file="b", start=0x1007)], [], "vram[1]: 8 bytes at 0x1007 overlap others"),
        ([vram(), vram(start=0x2000)], [], "vram[1].file: 'a' is listed twice"),
        ([], [arena(blocks=(ArenaBlock(0, 0, 4),))], "arena[0].blocks: they are not the 8 bytes of the file"),
        ([], [arena(blocks=(ArenaBlock(0, 0, 4), ArenaBlock(1, 2, 4)))], "arena[0].blocks[1]: 4 bytes at 0x2 overlap"),
        ([], [arena(blocks=(ArenaBlock(0, 0, 4), ArenaBlock(0, 4, 4)))], "arena[0].blocks: an index is listed twice"),
        ([], [arena(holes=(ArenaHole(4, 5),))], "arena[0].holes[0]: 5 bytes at 0x4 reach beyond 0x8"),
        ([], [arena(holes=(ArenaHole(0, 4), ArenaHole(3, 1)))], "arena[0].holes[1]: 1 bytes at 0x3 overlap others"),
    ],
)
def test_memory_that_cannot_be_is_refused(regions: list[VramFile], blocks: list[ArenaFile], reason: str) -> None:
    manifest = replace(SMALL, files=FILES, vram=tuple(regions), arena=tuple(blocks))
    assert reason in refused(encode(manifest))


def test_memory_that_can_be_is_accepted() -> None:
    manifest = replace(SMALL, files=FILES, vram=(vram(),), arena=(arena(holes=(ArenaHole(0, 4), ArenaHole(4, 4))),))
    assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize(
    "worst",
    [
        b"[" + b'{"a":"b"},' * (MOST_VALUES // 2 - 2) + b"0]",
        b"[" + b"[]," * (MOST_VALUES // 2 - 2) + b"0]",
        b"[" + b"1234567890123456789," * (MOST_VALUES - 2) + b"0]",
        b'"' + b"x" * (MOST_BYTES - 2) + b'"',
    ],
    ids=["objects", "arrays", "numbers", "text"],
)
def test_worst_document_takes_bounded_memory(worst: bytes) -> None:
    tracemalloc.start()
    try:
        refused(worst)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_bytes_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(encode(SMALL))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=20))
    try:
        decode(bytes(content))
    except ManifestInvalid:
        pass


@given(st.text())
def test_every_flat_name_is_one_that_the_system_takes(name: str) -> None:
    if is_flat(name):
        assert 0 < len(name.encode(errors="surrogateescape")) <= 255


def test_unknown_fields_are_shown_shortly() -> None:
    assert refusal(document(**{"a\nb": 1})).startswith("'a\\nb': unknown field")

"""The file next to an image: read back as it was written, refused where it is not root's own or not ours."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.registry.beside import (
    Beside,
    annotations_document,
    decode,
    decode_annotations,
    encode,
    keep,
    newest,
    read,
    stored,
    write,
)
from kybernate.registry.failures import NotKeptBeside
from kybernate.registry.model import Annotations
from kybernate_shim.checkpoint.image.manifest import REGISTRY

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TIMES = st.none() | st.datetimes(datetime(1970, 1, 2), datetime(2999, 1, 1), timezones=st.just(UTC))
NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,20}[A-Za-z0-9])?", fullmatch=True)
VALUES = TEXT.filter(str.isprintable)
ANNOTATIONS = st.builds(
    Annotations,
    st.integers(0, (1 << 63) - 1),
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.booleans(),
    TIMES,
    st.floats(0, 1e9),
    TEXT,
    TEXT,
    st.none() | st.integers(0, 1 << 40),
)
BESIDES = st.builds(Beside, TEXT, ANNOTATIONS, TIMES, TEXT)


@given(BESIDES)
def test_what_is_written_is_read(beside: Beside) -> None:
    assert decode(encode(beside)) == beside


@given(ANNOTATIONS)
def test_annotations_of_a_row_are_read(annotations: Annotations) -> None:
    assert decode_annotations(json.dumps(annotations_document(annotations))) == annotations


@given(st.binary(max_size=200) | st.tuples(BESIDES, st.integers(0, 400), st.binary(max_size=8)).map(
    lambda parts: encode(parts[0])[: parts[1]] + parts[2] + encode(parts[0])[parts[1] + len(parts[2]) :]
))  # fmt: skip
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        beside = decode(content)
    except ValueError:
        return
    assert decode(encode(beside)) == beside


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "expected an object"),
        (b'{"image": "i", "format": 2}', "format 2 is not understood"),
        (b'{"image": "i", "labels": [{"name": "", "value": ""}]}', "is not the name of a label"),
        (b'{"image": "i", "last_used": "yesterday"}', "Invalid isoformat"),
        (b'{"image": "i", "last_used": "2026-01-01T00:00:00"}', "not a time of RFC 3339"),
        (b'{"image": "i", "last_used": "0001-01-01T00:00:00+14:00"}', "date value out of range"),
        (b'{"image": "i", "revision": 18446744073709551615}', "revision: more than"),
        (b'{"image": "i", "more": 1}', "unknown field"),
    ],
)
def test_fault_is_named(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(content)


def test_file_is_roots_own_and_whole_at_any_time(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    before = os.umask(0)
    try:
        write(tmp_path, Beside("i", Annotations(1)))
    finally:
        os.umask(before)
    assert (tmp_path / REGISTRY).stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [REGISTRY]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_file_that_others_can_write_is_not_believed(tmp_path: Path, mode: int) -> None:
    write(tmp_path, Beside("i", Annotations(1)))
    (tmp_path / REGISTRY).chmod(mode)
    with pytest.raises(ValueError, match=f"has mode 0{mode:o}"):
        read(tmp_path)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / REGISTRY)
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path)
    (tmp_path / REGISTRY).unlink()
    (tmp_path / REGISTRY).symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path)
    (tmp_path / REGISTRY).unlink()
    with (tmp_path / REGISTRY).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than"):
        read(tmp_path)


def test_annotations_of_another_image_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, Beside("other", Annotations(9), damage="bits"))
    assert stored(tmp_path, "mine") == Beside("mine")
    keep(tmp_path, "mine", Annotations(1))
    keep(tmp_path, "mine", Annotations(2))
    assert read(tmp_path) == Beside("mine", Annotations(2))


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, Beside("i", Annotations(1)))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotKeptBeside, match="No space left on device") as caught:
        write(tmp_path, Beside("i", Annotations(2)))
    assert caught.value.state == "nothing was changed"
    assert read(tmp_path) == Beside("i", Annotations(1))
    assert [path.name for path in tmp_path.iterdir()] == [REGISTRY]


def test_highest_revision_wins_and_the_first_of_equals() -> None:
    one, two, three = Annotations(1), Annotations(2, {"a": "1"}), Annotations(2, {"b": "2"})
    assert newest(one, two, three) is two
    assert newest() == Annotations()

"""A container's log is read from its end and followed over restarts and rotations; what a tenant writes is bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node import container_log
from kybernate.node.container_log import LINE_BYTES, Line, Lines, LogFile
from kybernate.node.failure import Missing


def line(text: str, tag: str = "F", stream: str = "stdout") -> str:
    return f"2026-01-01T00:00:00.500000000Z {stream} {tag} {text}\n"


def texts(lines: list[Line]) -> list[str]:
    return [one.text for one in lines]


def test_lines_are_followed_over_a_rotation_and_a_restart(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(line("one") + line("two"))
    reader = LogFile(log)
    assert texts(reader.tail(10)) == ["one", "two"]
    assert reader.more() == []
    with log.open("a") as written:
        written.write(line("late"))
        written.flush()
        log.rename(tmp_path / "0.log.20260101-000000")
        log.write_text(line("three"))
        assert texts(reader.more()) == ["late"]
        written.write(line("last of the old file"))
        written.flush()
        assert texts(reader.more()) == ["last of the old file"]
        assert texts(reader.more()) == ["three"]
    (tmp_path / "1.log").write_text(line("four"))
    assert texts(reader.more()) == ["four"]
    reader.close()


def test_file_that_is_truncated_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_text("one\ntwo\n")
    reader = LogFile(log)
    assert texts(reader.tail(1)) == ["two"]
    log.write_text("new\n")
    assert texts(reader.more()) == ["new"]
    reader.close()


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=40), max_size=30),
    st.integers(0, 40),
)
def test_tail_is_the_last_lines(written: list[str], count: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(container_log, "READ_BYTES", 7)
        log = Path(directory) / "0.log"
        log.write_bytes("".join(map(line, written)).encode())
        reader = LogFile(log)
        assert texts(reader.tail(count)) == (written[-count:] if count else [])
        assert reader.more() == []
        reader.close()


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_log, "TAIL_BYTES", 1000)
    (tmp_path / "0.log").write_text("".join(line(f"{n:05}") for n in range(5000)))
    reader = LogFile(tmp_path / "0.log")
    found = texts(reader.tail(4000))
    assert found[-1] == "04999"
    assert 10 < len(found) < 30
    assert all(len(one) == 5 for one in found)  # none begins in its middle
    reader.close()


@given(st.lists(st.integers(1, 50), max_size=8), st.binary(max_size=200))
def test_lines_are_the_same_however_they_are_divided(cuts: list[int], written: bytes) -> None:
    whole, parts = Lines().take(written + b"\n"), Lines()
    found, rest = [], written + b"\n"
    for cut in cuts:
        found += parts.take(rest[:cut])
        rest = rest[cut:]
    assert found + parts.take(rest) == whole


def test_parts_of_a_line_are_joined_by_their_stream() -> None:
    found = Lines().take(
        (line("one ", "P") + line("other", "F", "stderr") + line("line", "F:x") + line("", "F")).encode()
    )
    assert [(one.stream, one.text) for one in found] == [("stderr", "other"), ("stdout", "one line"), ("stdout", "")]
    assert found[1].time == 1767225600.5


@pytest.mark.parametrize("tag", ["F", "P"])
def test_line_without_an_end_is_bounded(tag: str) -> None:
    lines = Lines()
    head = line("x" * 16384, tag)[: None if tag == "P" else -1].encode()
    for _ in range(100):
        assert lines.take(head) == []
    assert len(lines._rest) <= 2 * LINE_BYTES
    assert all(len(one.text) <= LINE_BYTES for one in lines._parts.values())
    (found,) = lines.take(b"\n" if tag == "F" else line("end").encode())
    assert len(found.text.encode()) == LINE_BYTES
    assert found.cut
    assert str(found).endswith("x […]\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"2026-01-01T00:00:00Z stdout F ", ""),
        (b"no such line", "no such line"),
        (b"now stdout F text", "now stdout F text"),
        (b"2026-01-01T00:00:00Z stdout F \xff", "\ufffd"),
        (b"9999-99-99T99:99:99Z stdout F text", "text"),
    ],
)
def test_text_of_a_line(written: bytes, shown: str) -> None:
    assert texts(Lines().take(written + b"\n")) == [shown]


def test_link_and_fifo_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "0.log").symlink_to("/etc/passwd")
    with pytest.raises(Missing, match="not a regular file"):
        LogFile(tmp_path / "0.log").tail(1)
    os.mkfifo(tmp_path / "1.log")
    with pytest.raises(Missing, match="not a regular file"):
        LogFile(tmp_path / "0.log").tail(1)
    with pytest.raises(Missing, match="No such file"):
        LogFile(tmp_path / "none.log").tail(1)

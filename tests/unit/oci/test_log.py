"""The runtime's log: the last error after a given size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.oci.log import TAIL_LIMIT, _error, last_error, size

RUNC = '{"level":"error","msg":"container does not exist","time":"2026-01-01T00:00:00Z"}\n'
CRUN = '{"msg":"open pidfd: No such process","level":"error","time":"2026-01-01T00:00:00.000001Z"}\n'
WARNING = '{"level":"warning","msg":"deprecated","time":"2026-01-01T00:00:00Z"}\n'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.json"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (RUNC, "container does not exist"),
        (CRUN, "open pidfd: No such process"),
        (RUNC + CRUN, "open pidfd: No such process"),
        (RUNC + WARNING, "container does not exist"),
        (RUNC + "not json\n[1]\n\n", "container does not exist"),
        (RUNC.rstrip(), "container does not exist"),
        (RUNC + '{"level":"error","msg":""}\n', "container does not exist"),
        (WARNING, ""),
        ("", ""),
    ],
)
def test_last_error_is_found_in_either_format(log: Path, lines: str, message: str) -> None:
    log.write_text(lines)
    assert last_error(log) == message


def test_errors_of_earlier_calls_do_not_count(log: Path) -> None:
    log.write_text(RUNC)
    before = size(log)
    assert last_error(log, before) == ""
    log.write_text(RUNC + CRUN)
    assert last_error(log, before) == "open pidfd: No such process"


def test_missing_log_has_no_error(log: Path) -> None:
    assert (size(log), last_error(log)) == (0, "")


def test_end_of_a_huge_log_is_enough(log: Path) -> None:
    log.write_text(WARNING * (2 * TAIL_LIMIT // len(WARNING)) + RUNC)
    assert last_error(log) == "container does not exist"


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(lambda value: json.dumps(value).encode()))
def test_any_line_is_read_or_passed_over(line: bytes) -> None:
    assert isinstance(_error(line), str)
    assert _error(b"[" * 100_000) == ""

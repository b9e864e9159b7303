"""The runtime's log: the last error after a given size."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.oci.log import TAIL_LIMIT, last_error, size

RUNC = '{"level":"error","msg":"container does not exist","time":"2026-01-01T00:00:00Z"}\n'
CRUN = '{"msg":"open pidfd: No such process","level":"error","time":"2026-01-01T00:00:00.000001Z"}\n'
NEWER_CRUN = """{
  "msg": "executable file `\\/bin\\/nope` not found: No such file or directory",
  "level": "error",
  "time": "2026-01-01T00:00:00.000001Z"
}
"""
WARNING = '{"level":"warning","msg":"deprecated","time":"2026-01-01T00:00:00Z"}\n'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.json"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (RUNC, "container does not exist"),
        (CRUN, "open pidfd: No such process"),
        (NEWER_CRUN, "executable file `/bin/nope` not found: No such file or directory"),
        (
            NEWER_CRUN + NEWER_CRUN.replace("nope", "other") + WARNING,
            "executable file `/bin/other` not found: No such file or directory",
        ),
        (NEWER_CRUN.rstrip()[:-1] + RUNC, "container does not exist"),
        (NEWER_CRUN[20:] + RUNC, "container does not exist"),
        ("{\n{ x\n" + RUNC, "container does not exist"),
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


parts = st.binary(max_size=60) | st.sampled_from([b"{\n", b"\n{", NEWER_CRUN.encode(), WARNING.encode(), b"[" * 2000])


@given(st.lists(parts))
def test_any_content_before_an_error_is_passed_over(parts: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as log:
        log.write(b"".join(parts) + b"\n" + RUNC.encode())
        log.flush()
        assert last_error(Path(log.name)) == "container does not exist"


def test_deep_nesting_costs_little(log: Path) -> None:
    log.write_text('{"a":\n' * 40_000 + "\n" + RUNC)
    begin = time.monotonic()
    assert last_error(log) == "container does not exist"
    assert time.monotonic() - begin < 5

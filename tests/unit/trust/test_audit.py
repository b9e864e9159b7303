"""The audit log: one line for each decision, whatever a pod's author has written, and whatever happens to the file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

from kybernate_shim.config import Config
from kybernate_shim.errors import Damaged, Missing, NoRoom, Refused
from kybernate_shim.trust import audit
from kybernate_shim.trust.audit import LONGEST, Audit, ImageRef, decision_of, write
from kybernate_shim.trust.caller import Caller
from kybernate_shim.trust.requester import Requester

LINE = Audit("restore", "refused", Requester("tenant", "ns", "pod", "uid", "app"), "task", "k8s.io", ImageRef("/i"))


def written(file: Path, record: Audit = LINE) -> list[dict[str, Any]]:
    log = CapturingLogger()
    write(record, Config(audit_log=file), log)
    assert [call.kwargs for call in log.calls if call.args == ("audit.lost",)] == []
    return [json.loads(line) for line in file.read_text().splitlines()]


def lost(file: Path) -> str:
    """Write a line that cannot be written, and return the reason that the daemon's log has."""
    log = CapturingLogger()
    write(LINE, Config(audit_log=file), log)
    event, loss = log.calls
    assert (event.method_name, event.args, event.kwargs["verb"]) == ("info", ("audit.recorded",), "restore")
    assert (loss.method_name, loss.args) == ("error", ("audit.lost",))
    return str(loss.kwargs["error"])


def test_line_has_every_field(tmp_path: Path) -> None:
    caller = Caller("kybernate.shim.v1.Shim", "Suspend", 0, 0)
    (line,) = written(tmp_path / "new" / "audit", Audit("suspend", "done", caller=caller, seconds=1.23456))
    assert list(line) == [
        "time", "verb", "decision", "reason", "requester", "caller", "task", "containerd_namespace", "image", "seconds",
    ]  # fmt: skip
    assert line["requester"] == {"kind": "node", "namespace": "", "pod": "", "uid": "", "container": ""}
    assert line["caller"] == {"by": "kybernate", "method": "Suspend", "uid": 0, "pid": 0, "login_uid": None, "name": ""}
    assert line["seconds"] == 1.235


def test_file_and_its_directory_are_for_root_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    written(tmp_path / "new" / "audit")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "audit").stat().st_mode & 0o777 == 0o600
    assert os.umask(before) == before


def test_lines_are_added_and_a_rotated_file_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    written(file)
    assert len(written(file)) == 2
    file.rename(tmp_path / "audit.1")
    assert len(written(file)) == 1


@given(st.text(max_size=200))
def test_no_value_ends_a_line_or_leaves_ascii(value: str) -> None:
    fields = Audit(
        "restore", "refused", Requester("tenant", value, value, value, value), value, value, ImageRef(value), value
    ).document()
    lines: list[bytes] = []
    line = json.dumps(fields)
    assert json.loads(line)["reason"] == value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: lines.append(data) or len(data))
        audit.append(Path("/dev/shm/kybernate-audit-test"), fields)
    Path("/dev/shm/kybernate-audit-test").unlink()
    assert lines[0].count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in lines[0][:-1])
    assert json.loads(lines[0])["requester"]["pod"] == value


def test_long_values_are_cut(tmp_path: Path) -> None:
    long = "x" * (1 << 18)
    (line,) = written(tmp_path / "a", Audit("restore", "failed", Requester("tenant", pod=long), reason=long))
    assert len(line["reason"]) == len(line["requester"]["pod"]) == LONGEST


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / "audit").symlink_to(tmp_path / "victim")
    assert os.strerror(errno.ELOOP) in lost(tmp_path / "audit")
    assert (tmp_path / "victim").read_text() == ""


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit")
    assert "not a regular file" in lost(tmp_path / "audit")


def test_full_disk_is_an_error_of_the_log_and_the_next_line_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "audit"
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        assert "is the disk full?" in lost(file)
    write(LINE, Config(audit_log=file), CapturingLogger())
    torn, whole = file.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["verb"] == "restore"


def test_without_a_file_the_log_has_the_line() -> None:
    log = CapturingLogger()
    write(LINE, Config(audit_log=None), log)
    (event,) = log.calls
    assert event.kwargs["requester"]["pod"] == "pod"


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (Refused(), "refused"),
        (Missing(), "refused"),
        (Damaged(), "refused"),
        (NoRoom(), "refused"),
        (OSError(), "failed"),
    ],
)
def test_errors_that_begin_nothing_are_refusals(error: Exception, decision: str) -> None:
    assert decision_of(error) == decision

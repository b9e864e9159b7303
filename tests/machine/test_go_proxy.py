"""A machine that reaches no Go module proxy: what `make test` says of it, with the machine's own Go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import go_programs


@pytest.mark.parametrize("proxy", ["off", "http://127.0.0.1:9", "http://127.0.0.1:9,off"])
def test_reason_is_one_line_that_names_module_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    program = go_programs.go()
    monkeypatch.setattr(go_programs, "go", lambda: program)
    monkeypatch.setenv("KYBERNATE_LAB_CACHE", str(tmp_path))  # nothing is built there
    monkeypatch.setenv("GOPROXY", proxy)
    for name in go_programs.PROGRAMS:
        reason = go_programs.lacking(name) or ""
        assert reason.startswith("no Go module proxy serves "), reason
        assert "disabled by GOPROXY=off" in reason or "connection refused" in reason
        assert len(reason.splitlines()) == 1
    assert not list(tmp_path.glob("go-*"))

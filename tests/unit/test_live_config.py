"""The node's file as it is now: read when it has changed, and kept where it cannot be used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from kybernate_shim.config import LIVE, Config, GpuSettings
from kybernate_shim.config.documenting import documented
from kybernate_shim.live_config import LiveConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shim.toml"


def write(file: Path, text: str) -> None:
    """Replace the file by one that is old enough to be believed."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def test_change_is_noticed_on_use(file: Path) -> None:
    live = LiveConfig(CapturingLogger(), file)
    assert live.read() == Config()
    write(file, "[gpu]\nlock = 7")
    assert live.read().gpu.lock == 7
    write(file, "[gpu]\nlock = 8")
    assert live.read().gpu.lock == 8
    file.unlink()
    assert live.read() == Config()


def test_file_that_has_not_changed_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, "[gpu]\nlock = 7")
    later = time.time_ns() + 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later)
    live = LiveConfig(CapturingLogger(), file)
    first = live.read()
    assert live.read() is first


def test_file_that_was_changed_just_now_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may stay the same at the next change."""
    write(file, "[gpu]\nlock = 7")
    monkeypatch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns)
    live = LiveConfig(CapturingLogger(), file)
    first = live.read()
    assert live.read() is not first


def test_broken_file_keeps_the_last_settings_and_is_told_once(file: Path) -> None:
    log = CapturingLogger()
    live = LiveConfig(log, file)
    write(file, "[gpu]\nlock = 7")
    live.read()
    for _ in range(3):
        write(file, "[gpu")
        os.utime(file)
        assert live.read().gpu.lock == 7
    assert "not TOML" in live.problem
    write(file, "[gpu]\nlock = 8")
    assert live.read().gpu.lock == 8
    assert live.problem == ""
    assert [call.args[0] for call in log.calls] == ["config.rejected", "config.accepted"]


def test_container_follows_what_is_live_and_keeps_the_rest() -> None:
    old = Config()
    new = Config(runtime="crun", verify=False, gpu=GpuSettings(lock=7, arena_containers="all"))
    found = old.replaced_by(new)
    assert (found.verify, found.gpu.lock) == (False, 7)
    assert (found.runtime, found.gpu.arena_containers) == ("", "annotated")
    assert {row.since for row in documented()} > {LIVE}

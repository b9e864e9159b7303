"""Where there is systemd, `up -d` is a service of it, which a boot starts, and `down` removes it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kybernate.node.failure import Invalid, Unavailable
from kybernate.up import background


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A service manager that starts what it is asked to; return the calls of systemctl."""
    calls: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    (tmp_path / "running").mkdir()
    monkeypatch.setattr(background, "SYSTEMD", tmp_path / "running")
    monkeypatch.setattr(background, "UNITS", tmp_path)
    monkeypatch.setattr(background, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(background, "running_process", lambda project: 7 if len(calls) == 2 else 0)
    monkeypatch.setattr(background, "answers", lambda project, seconds: True)
    return calls


def test_service_is_written_enabled_and_removed(tmp_path: Path, systemd: list[list[str]]) -> None:
    file = tmp_path / "100% models.yaml"
    file.write_text("models: {}")
    process, where = background.start(file, "home", "unix:/a b", watch=True)
    unit = tmp_path / "kybernate-up-home.service"
    text = unit.read_text()
    assert (process, where) == (7, "journalctl -u kybernate-up-home.service")
    assert systemd == [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", unit.name]]
    assert f"up '{tmp_path}/100%% models.yaml' --agent 'unix:/a b' --watch" in text
    assert "Restart=always" in text
    assert "KillMode=process" in text  # what it has started is containerd's
    background.end("home")
    assert not unit.exists()
    assert systemd[2:] == [["systemctl", "disable", "--now", unit.name], ["systemctl", "daemon-reload"]]


def test_service_is_there_when_its_proxy_listens(
    tmp_path: Path, systemd: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {}")
    said = iter([False, False, True])
    monkeypatch.setattr(background, "answers", lambda project, seconds: seconds > 0 and next(said))
    assert background.start(file, "home", "", watch=False)[0] == 7
    assert next(said, None) is None
    monkeypatch.setattr(background, "START_SECONDS", 0.0)
    monkeypatch.setattr(background, "answers", lambda project, seconds: False)
    systemd.clear()
    with pytest.raises(Unavailable, match="takes requests after 0 s"):
        background.start(file, "home", "", watch=False)


def test_file_that_needs_the_shells_variables_is_no_service(tmp_path: Path, systemd: list[list[str]]) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {image: '${FROM_SHELL}'}}")
    with pytest.raises(Invalid, match=r"the variable FROM_SHELL is not set; a service .* has none") as refused:
        background.start(file, "home", "", watch=False)
    assert "env_file" in refused.value.advice
    assert systemd == []
    assert not background.unit_of("home").exists()


def test_service_that_does_not_start_is_told(
    tmp_path: Path, systemd: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {}")
    refused = subprocess.CompletedProcess([], 1, "", "no such unit")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(Unavailable, match="systemctl daemon-reload: no such unit"):
        background.start(file, "home", "", watch=False)

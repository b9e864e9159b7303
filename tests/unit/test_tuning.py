"""One switch leaves the interpreter as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kybernate_shim import config, imports, tuning
from kybernate_shim.config import Config
from kybernate_shim.fork_server import server


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_on", True)  # and put back what was
    tuning.switch_off()


def test_modules_look_as_if_not_installed_unless_it_is_off() -> None:
    with imports.without("no_such_module"):
        assert "no_such_module" in sys.modules


def test_no_module_is_hidden_or_stood_in_for_when_it_is_off(off: None) -> None:
    with imports.without("no_such_module"):
        assert "no_such_module" not in sys.modules
    imports.postpone("no_such_module")
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize(("content", "on"), [("", True), ("fork_server_tuning = false", False), ("not TOML", True)])
def test_the_nodes_file_has_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, on: bool) -> None:
    file, load = tmp_path / "shim.toml", Config.load
    file.write_text(content)
    monkeypatch.setattr(config.Config, "load", lambda: load(file))
    assert server._tuned() is on

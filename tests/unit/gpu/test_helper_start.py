"""The CUDA helper that a command line starts is the installed one, wherever it is called."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kybernate_shim.address import answers
from kybernate_shim.gpu.helper_client import log_path, start_helper
from tests.fakes.actor import eventually


def test_modules_of_the_callers_directory_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is root, and the directory may be another user's."""
    place, loaded, socket = tmp_path / "place", tmp_path / "loaded", tmp_path / "run" / "cuda.sock"
    for module in ("kybernate_shim", "structlog", "asyncio"):
        (place / module).mkdir(parents=True)
        (place / module / "__init__.py").write_text(f"open({str(loaded)!r}, 'w').close()\n")
    monkeypatch.chdir(place)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which a developer may have set to "."
    pid = start_helper(socket, idle_seconds=60)
    try:
        eventually(lambda: answers(socket) or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        assert answers(socket), log_path(socket).read_text()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not loaded.exists()

"""The container that is dumped."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.checkpoint import frozen_state
from kybernate_shim.checkpoint.criu import credentials, images
from tests.unit.checkpoint.dump.dumping import writes
from tests.unit.checkpoint.fake_target import FakeTarget


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A container whose CRIU writes one file."""
    monkeypatch.setattr(images, "processes", lambda image: ())
    monkeypatch.setattr(credentials, "credentials", lambda image: ())
    monkeypatch.setattr(frozen_state, "make_restorable", lambda target, request, volumes: None)
    made = FakeTarget(tmp_path)
    made.children.on["checkpoint"] = writes(made, 0)
    return made

"""What the tests of servers and clients share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a server listens."""
    return tmp_path / "s"
